"""Checkpoints: completeness, seals and content."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action, Add, Metadata, Protocol, Txn
from millpond.statestore.log.checkpoint import checkpoint_path, checkpoints_among, read_part, write_part

PATH = checkpoint_path(7)
ACTIONS: tuple[Action, ...] = (
    Protocol(),
    Metadata(table_id="t", name="rows", schema_string="{}", configuration={"a": "b"}),
    Txn(app_id="sink", version=3, updated_ms=5),
    Add(
        path="a",
        size_bytes=1,
        partition_values={"computation": "c"},
        modification_time_ms=2,
        tags={"superstep": "1"},
        data_change=False,
    ),
)


def test_actions_round_trip_through_checkpoint() -> None:
    assert set(map(repr, read_part(write_part(ACTIONS, PATH), PATH))) == set(map(repr, ACTIONS))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"x" * 11, b"\xff\xff\xff\xffPAR1", b"PAR1" * 30])
def test_non_parquet_checkpoint_is_named(data: bytes) -> None:
    with pytest.raises(DataError, match=PATH):
        list(read_part(data, PATH))


def test_missing_seal_is_noticed() -> None:
    """The content records that there was one; a tool that rewrites the file drops it."""
    table = pq.read_table(pa.BufferReader(write_part(ACTIONS, PATH)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)

    with pytest.raises(DataError, match="changed since it was written"):
        list(read_part(sink.getvalue().to_pybytes(), PATH))


def test_foreign_checkpoint_needs_no_seal() -> None:
    table = pq.read_table(pa.BufferReader(write_part(ACTIONS, PATH))).replace_schema_metadata(None)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)

    assert len(list(read_part(sink.getvalue().to_pybytes(), PATH))) == len(ACTIONS)


def test_incomplete_checkpoint_is_ignored() -> None:
    folder = "_delta_log/"
    part = f"{folder}00000000000000000009.checkpoint.{{:010d}}.0000000002.parquet"
    among = [part.format(1), checkpoint_path(7), f"{folder}00000000000000000009.json"]

    assert [each.version for each in checkpoints_among(among)] == [7]
    assert [each.version for each in checkpoints_among([*among, part.format(2)])] == [7, 9]
