"""
Bounded input: cut into pieces, whose rows to come say how far event time has passed.

All rows are here from the beginning, so the low watermark of an input is the least time of those that are
still to come: exact, whatever their order, and no record is late. Where rows are sorted, or out of order
by a bounded time, windows close and timers fire as the input goes on, instead of all at the end. Of several
inputs the one that has come least far goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.event_time.clocks import PercentileTimes
from millpond.executor.injectors.ingress_time import IngressTime
from millpond.executor.injectors.policies import Perfect
from millpond.executor.injectors.policy import ManualWatermark
from millpond.executor.local.rows import pieces
from millpond.executor.local.run import LocalRun
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX
from millpond.executor.pipeline.extract_rows import Rows, oldest_time, readable_times, row_count
from millpond.executor.pipeline.nodes import InjectorNode
from millpond.executor.pipeline.positions import BOUNDED_SOURCE, LOCAL_SOURCE, consumed_before
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

__all__ = ["consume_inputs", "observe_rows"]

_BEGINNING: Final = EventTimeMicros(TIME_MIN_US)
_END: Final = EventTimeMicros(TIME_MAX_US)


@dataclass(slots=True)
class _Input:
    """
    The rest of an input.

    Attributes:
        stream: the injected stream.
        consumed: how many of its rows the store has consumed.
        rest: the pieces to come, with their numbers of rows.
        oldest: the least time of each of these and all after it.
        at: which piece is next.
        shares: by the number of rows before a piece, the percentile watermarks that it meets.
    """

    stream: str
    consumed: int
    rest: list[tuple[int, Rows]]
    oldest: list[EventTimeMicros] = field(default_factory=list)
    at: int = 0
    shares: Mapping[int, PercentileTimes] = field(default_factory=dict)

    @property
    def is_left(self) -> bool:
        return self.at < len(self.rest)

    @property
    def oldest_at(self) -> EventTimeMicros:
        """
        The least time still to come; the beginning of time where that is not known.
        """
        if not self.is_left:
            return _END
        return self.oldest[self.at] if self.oldest else _BEGINNING

    def measure(self, node: InjectorNode) -> None:
        """
        Find the least time of the rows to come, piece by piece.
        """
        oldest, found = _END, list[EventTimeMicros]()
        for _, piece in reversed(self.rest):
            at = oldest_time(node, piece)
            oldest = oldest if at is None else min(oldest, at)
            found.append(oldest)
        self.oldest = found[::-1]

    def consume(self, run: LocalRun, watermarks: Mapping[str, EventTimeMicros]) -> None:
        """
        Run a superstep on the next piece.
        """
        count, piece = self.rest[self.at]
        self.consumed += count
        self.at += 1
        position = InputPosition(stream=self.stream, source=LOCAL_SOURCE, batch=self.consumed)
        after = {self.stream: self.oldest_at} if self.oldest and run.topology.sorts else {}
        if shares := self.shares.get(self.consumed - count):
            run.advance_percentiles(self.stream, shares)
        run.consume(self.stream, piece, position, watermarks=watermarks, after=after)


def consume_inputs(run: LocalRun, given: Mapping[str, Rows], *, finish: bool) -> None:
    """
    Consume the rows that the store has not consumed, in supersteps; positions count rows.

    Args:
        run: a run without a thread.
        given: the rows of each injected stream.
        finish: whether these are all; otherwise only the policies say what may still come.

    Raises:
        InvalidError: the rows do not fit, or the store has consumed other inputs.
        MillpondError: the error that ended the run.
    """
    inputs = [found for stream, rows in given.items() if (found := _rest_of(run, stream, rows)) is not None]
    topology = run.topology
    if finish and _can_follow(topology) and (topology.sorts or any(len(one.rest) > 1 for one in inputs)):
        for one in inputs:
            if _has_times(topology.injectors[one.stream]):
                one.measure(topology.injectors[one.stream])
                one.shares = _shares(topology, one.stream, given[one.stream])
    while left := [one for one in inputs if one.is_left]:
        known = {one.stream: one.oldest_at for one in inputs if one.oldest}
        min(left, key=lambda one: one.oldest_at).consume(run, known)


def _shares(topology: Topology, stream: str, rows: Rows) -> dict[int, PercentileTimes]:
    """
    The percentile watermarks at the beginning of each piece, by the number of rows before it.

    As of streaming input: the newest time so far, less the delay that so many percent of the rows do not
    exceed, each measured against the newest of the pieces before its own. All delays are known here.
    """
    if not topology.percentiles:
        return {}
    node, start = topology.injectors[stream], 0
    newest: EventTimeMicros | None = None
    known: dict[int, EventTimeMicros] = {}
    delays = [np.zeros(0, np.int64)]
    for count, piece in pieces(rows, BUNDLE_RECORDS_MAX):
        at = readable_times(node, piece)
        if newest is not None:
            known[start] = newest
            delays.append(np.maximum(newest - at, 0))
        if len(at):
            newest = max(newest or _BEGINNING, EventTimeMicros(int(at.max())))
        start += count
    measured = np.concatenate(delays)
    behind = {share: _quantile(measured, share) for share in topology.percentiles}
    return {
        start: {share: EventTimeMicros(newest - delay) for share, delay in behind.items()}
        for start, newest in known.items()
    }


def _quantile(delays: npt.NDArray[np.int64], percentile: float) -> int:
    return int(np.percentile(delays, percentile, method="higher")) if len(delays) else 0


def _can_follow(topology: Topology) -> bool:
    """
    Whether nothing may be moved to before the watermark: what an unbounded horizon lets pass must not be late.
    """
    return all(node.computation.late_data_horizon != "unbounded" for node in topology.computations.values())


def _has_times(node: InjectorNode) -> bool:
    """
    Whether the rows say when they happened, and the policy does not say that the watermark waits.
    """
    return not isinstance(node.at, IngressTime) and not isinstance(node.watermark, Perfect | ManualWatermark)


def _rest_of(run: LocalRun, stream: str, rows: Rows) -> _Input | None:
    run.check_rows(stream, rows)
    known = run.consumed(stream)
    if BOUNDED_SOURCE in known:
        run.note_skipped(stream, consumed_before(stream, row_count(rows), run.observed(stream)))
        return None
    foreign = sorted(set(known) - {LOCAL_SOURCE})
    if foreign:
        raise InvalidError(
            "this store has consumed the input through a streaming checkpoint; go on with it, or start a new store",
            input=stream,
            checkpoint=foreign[0],
        )
    consumed, count = known.get(LOCAL_SOURCE, 0), row_count(rows)
    if consumed > count:
        raise InvalidError(
            "the store has consumed more of this input than there is: it is another input",
            input=stream,
            rows=count,
            consumed=consumed,
        )
    if consumed:
        share = "all" if consumed == count else f"{consumed:,} of"
        run.note_skipped(stream, f"{share} {count:,} rows were consumed before")
    return _Input(stream, consumed, list(pieces(_from(rows, consumed), BUNDLE_RECORDS_MAX)))


def observe_rows(run: LocalRun, stream: str, rows: Rows) -> None:
    """
    Let the watermark follow the rows that it does not know yet, now that all of them are consumed.

    A run that was killed before it came to this may have left some.
    """
    consumed = run.consumed(stream).get(LOCAL_SOURCE, 0)
    observed = min(run.observed(stream) or 0, consumed)
    is_stamped = isinstance(run.topology.injectors[stream].at, IngressTime)
    if observed < consumed and not is_stamped:
        position = InputPosition(stream=stream, source=LOCAL_SOURCE, batch=consumed, rows=consumed)
        run.observe(stream, _from(rows, observed), position)


def _from(rows: Rows, start: int) -> Rows:
    return rows.slice(start) if isinstance(rows, pa.Table) else rows[start:]
