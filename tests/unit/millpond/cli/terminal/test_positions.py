"""Positions of inputs, in words."""

from __future__ import annotations

import json

import pytest

from millpond.cli.terminal.inputs import consumed_inputs
from millpond.statestore.app_ids import AppId

FILE = json.dumps({"rows": 1_440, "file": "views/2.json", "row": 3, "files_before": 1})
SPARK = 'v1\n{"batchWatermarkMs":0}\n{"logOffset":7}\n-'


@pytest.mark.parametrize(
    ("source", "batch", "offsets", "position", "place"),
    [
        ("local", 1_440, FILE, "1,440 rows", "row 3 of views/2.json"),
        ("local", 2_000, FILE, "2,000 rows", None),
        ("local", 7, None, "7 rows", None),
        ("bounded", 0, None, "all of it", None),
        ("5f1c", 7, SPARK, "batch 7", '{"logOffset":7} -'),
        ("5f1c", 7, "v1", "batch 7", None),
        ("5f1c", -1, None, "nothing", None),
    ],
)
def test_position_is_described_in_words(
    source: str, batch: int, offsets: str | None, position: str, place: str | None
) -> None:
    """A file or an offset of another position is left out."""
    app_id = AppId.INPUT.of("shop", "orders/new", source)
    told = {} if offsets is None else {app_id: offsets}
    (found,) = consumed_inputs({AppId.SUPERSTEP.of("shop"): 3, app_id: batch}, told)

    assert (found.pipeline, found.input, found.source) == ("shop", "orders/new", source)
    assert (found.position, found.place) == (position, place)
