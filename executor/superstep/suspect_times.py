"""Event times that are possible, and more likely a mistake: warns once of a stream that has them.

Dates of these years in seconds are moments of the first hour of 1970 if they are taken for microseconds, and every
record is read. A single time far ahead of the clock moves the watermark there, and all that comes after is late. Both
are only likely, so the records are taken as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.observation import InputObservation
from millpond.executor.pipeline.topology import Topology

_LOG: Final = logging.getLogger("millpond")

_SECONDS_MIN: Final = 1_262_304_000
"""The year 2010 in seconds; in microseconds it is 21 minutes after 1970 begins."""

_SECONDS_MAX: Final = 2_208_988_799
"""The end of 2039 in seconds; in microseconds it is 37 minutes after 1970 begins."""

_AHEAD_US: Final = 366 * 86_400_000_000
"""Clocks and zones differ by less than a day; bookings are made for months ahead."""


class SuspectTimes:
    """Warns once per stream whose first records look like seconds, and once if a record lies far ahead of the clock.

    Args:
        topology: the checked pipeline.
    """

    def __init__(self, topology: Topology) -> None:
        timed = {
            name: node for name, node in topology.injectors.items() if not isinstance(node.at, IngressTime)
        }
        self._new = {name for name, node in timed.items() if not node.times.is_unit_given}
        self._on_time = set(timed)

    def note(self, inputs: Sequence[InputObservation], now_us: int) -> None:
        """Look at what a committed superstep has taken in.

        Args:
            inputs: the observations, of which a stream may have several.
            now_us: the time by the clock.
        """
        for stream in {seen.stream for seen in inputs} & self._on_time:
            newest = [
                seen.newest_at for seen in inputs if seen.stream == stream and seen.newest_at is not None
            ]
            oldest = [
                seen.oldest_at for seen in inputs if seen.stream == stream and seen.oldest_at is not None
            ]
            if not newest or not oldest:
                continue
            if stream in self._new:
                self._new.discard(stream)
                _warn_of_seconds(stream, min(oldest), max(newest))
            if max(newest) > now_us + _AHEAD_US:
                self._on_time.discard(stream)
                _warn_of_future(stream, max(newest), now_us)


def _warn_of_seconds(stream: str, oldest_us: int, newest_us: int) -> None:
    if oldest_us >= _SECONDS_MIN and newest_us <= _SECONDS_MAX:
        _LOG.warning(
            "the times of the stream all lie in the first hour of 1970, as dates in seconds do that are taken for "
            'microseconds: say inject(..., at_unit="s"), or at_unit="us" if they mean 1970: stream=`%s` oldest=`%s` '
            "newest=`%s`",
            stream,
            oldest_us,
            newest_us,
        )


def _warn_of_future(stream: str, newest_us: int, now_us: int) -> None:
    _LOG.warning(
        "a record's time lies more than a year ahead of the clock, and the watermark may follow it, so that all that "
        "comes after is late: look at the unit of the times, or leave such records out: stream=`%s` newest=`%s` now=`%s`",
        stream,
        _shown(newest_us),
        _shown(now_us),
    )


def _shown(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).isoformat()
