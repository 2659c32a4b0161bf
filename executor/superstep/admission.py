"""Input admission: which outside input a pipeline accepts, given what its store has consumed.

Event times that are possible, and more likely a mistake: warns once of a stream that has them.

Dates of these years in seconds are moments of the first hour of 1970 if they are taken for microseconds, and every
record is read. A single time far ahead of the clock moves the watermark there, and all that comes after is late. Both
are only likely, so the records are taken as they are.

Streams without a declared watermark: warns of the first record that is dropped, with a watermark that keeps it.

Without a declaration, rows are assumed to arrive in the order of their times. If they do not, windows close
before their rows arrive, and without a warning only a counter would show it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from millpond.executor.inputs.positions import admit_batch, consumed_elsewhere, input_positions
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.commit import Totals
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.instants import duration_text
from millpond.executor.time.observations import InputObservation
from millpond.executor.time.watermark_policies import IngressTime
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store


class InputAdmission:
    """Compares outside inputs with what the store has consumed of them.

    Args:
        store: the open store.
        topology: the checked pipeline.
        watermarks: know which inputs have ended.
        accept_checkpoint: whether to accept an outside source that the store does not know.
        accept_ended: whether to accept records of a stream that an earlier run has ended.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        watermarks: PipelineWatermarks,
        *,
        accept_checkpoint: bool,
        accept_ended: bool,
    ) -> None:
        self._store = store
        self._topology = topology
        self._watermarks = watermarks
        self._accept_checkpoint = accept_checkpoint
        self._accept_ended = accept_ended

    def admit(self, position: InputPosition) -> bool:
        """Whether a batch is new; see `admit_batch`.

        Raises:
            InvalidError: the source's checkpoint does not belong to this store, or its query to another pipeline.
        """
        accept, known = self._accept_checkpoint, self.consumed(position.stream)
        positions = self._store.committer.snapshot.txns
        other = consumed_elsewhere(positions, self._topology.name, position.source)
        if other is not None and not known and not accept:
            raise InvalidError(
                "another pipeline of this store has consumed this input's query: give the pipeline its former "
                "name again (foreach_batch: name= or pipeline=, and renamed_from= for the computation), or "
                "start the query with a new checkpoint",
                input=position.stream,
                pipeline=self._topology.name,
                consumed_by=other,
            )
        return admit_batch(known, position.stream, position.source, position.batch, accept_checkpoint=accept)

    def consumed(self, stream: str) -> dict[str, int]:
        """The consumed positions of a stream's outside inputs, by source."""
        return input_positions(self._store.committer.snapshot.txns, self._topology.name, stream)

    def offsets(self, stream: str, source: str) -> str | None:
        """Where the consumed position of a source lies, as the source said it; ``None`` if it did not."""
        app_id = AppId.INPUT.of(self._topology.name, stream, source)
        return self._store.committer.snapshot.source_offsets.get(app_id)

    @property
    def closed(self) -> frozenset[str]:
        """The injected streams that accept no more records, because an earlier run has ended their input."""
        return frozenset() if self._accept_ended else self._watermarks.ended_before

    def input_rows(self, stream: str) -> int | None:
        """How many rows of a bounded input count towards its watermark; ``None`` if unknown."""
        positions = self._store.committer.snapshot.txns
        return positions.get(AppId.INPUT_ROWS.of(self._topology.name, stream))


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


_DROPPED: Final = "dropped"


class ForgottenWatermarks:
    """Warns once per stream that is out of order, has only an assumed watermark, and has dropped records.

    Args:
        topology: the checked pipeline.
        watermarks: know how far behind the records of each stream were.
    """

    def __init__(self, topology: Topology, watermarks: PipelineWatermarks) -> None:
        self._watermarks = watermarks
        self._fed = {
            stream: topology.reached_from([stream])
            for stream, node in topology.injectors.items()
            if node.is_assumed
        }

    def note(self, counts: Totals) -> None:
        """Check the counts of a committed superstep."""
        if not counts.dropped:
            return
        for stream, fed in list(self._fed.items()):
            behind_us = self._watermarks.behind_us(stream)
            dropped = {
                name: counted[_DROPPED]
                for name, counted in counts.by_computation.items()
                if name in fed and counted.get(_DROPPED)
            }
            if not dropped or not behind_us:
                continue
            del self._fed[stream]
            name, count = next(iter(dropped.items()))
            _LOG.warning(
                "records came too late and are dropped, because no watermark was declared and rows are assumed to "
                'arrive in the order of their times: inject(..., watermark=BoundedDisorder("%s")) would have kept '
                "them: stream=`%s` computation=`%s` dropped=`%s`; later ones are only counted",
                duration_text(behind_us),
                stream,
                name,
                count,
            )
