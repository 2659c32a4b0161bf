"""Functions written for Spark's ``applyInPandasWithState``, and the same in Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.state import GroupState


def grouped(
    key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Return a function for ``applyInPandasWithState`` that obeys each row's column ``do``."""
    given = pd.concat(list(frames) or [pd.DataFrame({"do": [], "n": []})])
    told = sorted(zip(given["do"].tolist(), given["n"].tolist(), strict=True))
    yield pd.DataFrame({"seen": [_done(key, told, state)]})


def grouped_in_arrow(
    key: tuple[Any, ...], batches: Iterator[pa.RecordBatch], state: GroupState
) -> Iterator[pa.RecordBatch]:
    """Return the same for ``apply_in_arrow_with_state``."""
    told = sorted((row["do"], row["n"]) for batch in batches for row in batch.to_pylist())
    yield pa.record_batch({"seen": [_done(key, told, state)]})


def expecting(
    key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """Return a function with processing-time timeouts, as long as each row demands."""
    now_ms, before = state.getCurrentProcessingTimeMs(), state.getOption
    if before is not None and state.hasTimedOut:
        is_past = now_ms > before[0]
        if before[1] < 3 and key[0] == "again":
            state.update((now_ms + 1, before[1] + 1))
            state.setTimeoutDuration(1)
        else:
            state.remove()
        seen = f"{key} timed out {before[1]} {is_past} {state.exists}"
    else:
        told = sorted(int(n) for frame in frames for n in frame["n"])
        state.update((now_ms + told[0], 1))
        state.setTimeoutDuration(told[0])
        seen = f"{key} rows {told} {before is None}"
    yield pd.DataFrame({"seen": [seen]})


def _done(key: tuple[Any, ...], told: list[tuple[str, int]], state: GroupState) -> str:
    before = state.getOption
    for do, n in told:
        if do == "update":
            state.update((n, f"at {n}"))
        elif do == "remove":
            state.remove()
        elif do == "timeout":
            state.setTimeoutTimestamp(n)
    if state.hasTimedOut and before is not None and before[0] > 90:
        state.update((0, "timed out"))
        state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 2_000)
    elif state.hasTimedOut:
        state.remove()
    return f"{key} {told} {state.hasTimedOut} {before} {state.getOption} {state.getCurrentWatermarkMs()}"
