"""Record ids of several injectors."""

from __future__ import annotations

from typing import Any

import millpond as mp
from tests.fixtures.computations import Count


def _run(streams: tuple[str, ...], batches: list[tuple[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    pipeline = mp.Pipeline("scopes")
    for stream in streams:
        pipeline.inject(stream, key="k", at="at", id="id")
    pipeline.add(Count(), name="count", subscribes=dict.fromkeys(streams), produces=())
    store = mp.Store.in_memory()
    run = mp.LocalRunner(store, progress=False).start(pipeline, stepping=True)
    for stream, rows in batches:
        run.inject(stream, rows)
        run.run_until_quiet()
    run.stop()
    return {row["key"]: row["state"] for row in store.rows_view("count").to_arrow().to_pylist()}


def test_equal_ids_on_two_streams_are_two_records() -> None:
    """Each stream's own duplicate still counts once."""
    row = {"k": "a", "at": 1, "id": "7", "n": 1}

    assert _run(("one", "two"), [("one", [row]), ("two", [row]), ("one", [row]), ("two", [row])]) == {
        "a": '{"count":2,"sum":2}'
    }


def test_duplicate_on_the_only_stream_counts_once() -> None:
    """Ids of a single stream are stored without a scope."""
    row = {"k": "a", "at": 1, "id": "7", "n": 1}

    assert _run(("one",), [("one", [row, row]), ("one", [row])]) == {"a": '{"count":1,"sum":1}'}
