"""Backfills: the past records that a computation gets when it joins a running pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from millpond.statestore.errors import InvalidError

INPUT: Final = "input"
"""The backfill from the rows of the runner's bounded input that are consumed already."""

Backfill: TypeAlias = Any
"""Rows as a runner takes them, the path of a Parquet file, ``"input"``, or a mapping from streams to these."""


def backfill_by_stream(computation: str, given: Backfill, streams: Sequence[str]) -> Mapping[str, Backfill]:
    """Return a computation's declared backfill by stream."""
    if isinstance(given, Mapping):
        if not given or (unknown := sorted(set(map(str, given)) - set(streams))):
            raise InvalidError(
                "a backfill is rows, or maps streams that the computation consumes to rows",
                computation=computation,
                streams=list(streams),
                given=list(given) if not given else unknown,
            )
        return dict(given)
    if len(streams) > 1:
        raise InvalidError(
            "the computation consumes several streams: map each to its backfill",
            computation=computation,
            streams=list(streams),
        )
    return {streams[0]: given}
