"""Backfills as the user declares them: what a computation that joins a running pipeline is given of the past."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from millpond.statestore.errors import InvalidError

INPUT: Final = "input"
"""The backfill that is what the runner's bounded input has been consumed of."""

Backfill: TypeAlias = Any
"""Rows as a runner takes them, the path of a Parquet file, ``"input"``, or a mapping from streams to these."""


def backfill_by_stream(computation: str, given: Backfill, streams: Sequence[str]) -> Mapping[str, Backfill]:
    """What a computation is given, by stream.

    Args:
        computation: its name, for errors.
        given: what the user has declared.
        streams: those that it consumes.

    Raises:
        InvalidError: it is not said of which stream it is.
    """
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
