"""Record ids of several injectors: each publisher's ids are its own."""

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


def test_the_same_id_on_two_streams_is_two_records() -> None:
    """Neither publisher's record hides the other's, and each one's repetition counts once."""
    row = {"k": "a", "at": 1, "id": "7", "n": 1}

    assert _run(("one", "two"), [("one", [row]), ("two", [row]), ("one", [row]), ("two", [row])]) == {
        "a": '{"count":2,"sum":2}'
    }


def test_the_ids_of_an_only_stream_are_kept_as_they_came() -> None:
    """A repetition on the only stream with ids counts once."""
    row = {"k": "a", "at": 1, "id": "7", "n": 1}

    assert _run(("one",), [("one", [row, row]), ("one", [row])]) == {"a": '{"count":1,"sum":1}'}
