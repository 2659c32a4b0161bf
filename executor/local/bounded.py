"""Bounded input: cut into pieces, whose remaining rows say how far event time has passed.

All rows are known from the beginning, so the low watermark of an input is the least time of its remaining rows:
exact, whatever their order, and no record is late. Where rows are nearly sorted, windows close and timers fire on the
way instead of all at the end. Of several inputs the one furthest behind continues. Only a piece of each input needs
to be in memory: a source of rows is read once for its times, and once more to consume it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from millpond.executor.inputs.extraction import InjectorNode, Rows, oldest_time, readable_times
from millpond.executor.inputs.positions import BOUNDED_SOURCE, LOCAL_SOURCE, consumed_before
from millpond.executor.local.rows import RowSource, source_of
from millpond.executor.local.run import LocalRun
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.clocks import PercentileTimes
from millpond.executor.time.watermark_policies import IngressTime, ManualWatermark, Perfect
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

_BEGINNING: Final = EventTimeMicros(TIME_MIN_US)
_END: Final = EventTimeMicros(TIME_MAX_US)


@dataclass(slots=True)
class _Input:
    """The rest of an input.

    Attributes:
        oldest: the least time of each remaining piece and all after it.
        shares: by the number of rows before a piece, the percentile watermarks that it meets.
    """

    stream: str
    source: RowSource
    consumed: int
    oldest: list[EventTimeMicros] = field(default_factory=list)
    at: int = 0
    shares: Mapping[int, PercentileTimes] = field(default_factory=dict)
    _rest: Iterator[tuple[int, Rows]] | None = None

    @property
    def is_left(self) -> bool:
        return self.consumed < self.source.count

    @property
    def oldest_at(self) -> EventTimeMicros:
        if not self.is_left:
            return _END
        return self.oldest[self.at] if self.oldest else _BEGINNING

    def measure(self, node: InjectorNode) -> None:
        times = [oldest_time(node, piece) for _, piece in self._pieces()]
        oldest, found = _END, list[EventTimeMicros]()
        for at in reversed(times):
            oldest = oldest if at is None else min(oldest, at)
            found.append(oldest)
        self.oldest = found[::-1]

    def _pieces(self) -> Iterator[tuple[int, Rows]]:
        return self.source.pieces(self.consumed, BUNDLE_RECORDS_MAX)

    def consume(self, run: LocalRun, watermarks: Mapping[str, EventTimeMicros]) -> None:
        if self._rest is None:
            self._rest = self._pieces()
        count, piece = next(self._rest)
        self.consumed += count
        self.at += 1
        position = InputPosition(
            stream=self.stream,
            source=LOCAL_SOURCE,
            batch=self.consumed,
            offsets=self.source.offsets(self.consumed),
        )
        after = {self.stream: self.oldest_at} if self.oldest and run.topology.sorts else {}
        if shares := self.shares.get(self.consumed - count):
            run.advance_percentiles(self.stream, shares)
        run.consume(self.stream, piece, position, watermarks=watermarks, after=after)


def consume_inputs(run: LocalRun, given: Mapping[str, Rows | RowSource], *, finish: bool) -> None:
    """Consume the rows that the store has not consumed, in supersteps; positions count rows.

    Without ``finish`` more rows may follow, so only the policies move watermarks.
    """
    rests = (_rest_of(run, stream, source_of(rows)) for stream, rows in given.items())
    inputs = [rest for rest in rests if rest is not None]
    topology = run.topology
    # An unbounded horizon lets a computation produce before the watermark: that must not be late.
    is_free = any(
        node.computation.late_data_horizon == "unbounded" for node in topology.computations.values()
    )
    is_cut = any(one.source.count - one.consumed > BUNDLE_RECORDS_MAX for one in inputs)
    if finish and not is_free and (topology.sorts or is_cut):
        for one in inputs:
            node = topology.injectors[one.stream]
            # Rows without event times, and a watermark that no time moves, have nothing to follow.
            if not isinstance(node.at, IngressTime) and not isinstance(
                node.watermark, Perfect | ManualWatermark
            ):
                one.measure(node)
                one.shares = _shares(topology, one.stream, one.source)
    while left := [one for one in inputs if one.is_left]:
        known = {one.stream: one.oldest_at for one in inputs if one.oldest}
        min(left, key=lambda one: one.oldest_at).consume(run, known)


def _shares(topology: Topology, stream: str, source: RowSource) -> dict[int, PercentileTimes]:
    """Return the percentile watermarks at the beginning of each piece, by the number of rows before it.

    As for streaming input: the newest time so far, less the delay that so many percent of the rows do not exceed.
    Delays are measured against the newest time of earlier pieces; here all delays are known.
    """
    if not topology.percentiles:
        return {}
    node, start = topology.injectors[stream], 0
    newest: EventTimeMicros | None = None
    known: dict[int, EventTimeMicros] = {}
    delays = [np.zeros(0, np.int64)]
    for count, piece in source.pieces(0, BUNDLE_RECORDS_MAX):
        at = readable_times(node, piece)
        if newest is not None:
            known[start] = newest
            delays.append(np.maximum(newest - at, 0))
        if len(at):
            newest = max(newest or _BEGINNING, EventTimeMicros(int(at.max())))
        start += count
    measured = np.concatenate(delays)
    behind = {
        share: int(np.percentile(measured, share, method="higher")) if len(measured) else 0
        for share in topology.percentiles
    }
    return {
        start: {share: EventTimeMicros(newest - delay) for share, delay in behind.items()}
        for start, newest in known.items()
    }


def _rest_of(run: LocalRun, stream: str, source: RowSource) -> _Input | None:
    run.check_rows(stream, source.first(BUNDLE_RECORDS_MAX))
    known = run.consumed(stream)
    if BOUNDED_SOURCE in known:
        run.note_skipped(stream, consumed_before(stream, source.count, run.observed(stream)))
        return None
    foreign = sorted(set(known) - {LOCAL_SOURCE})
    if foreign:
        raise InvalidError(
            "this store has consumed the input through a streaming checkpoint; go on with it, or start a new store",
            input=stream,
            checkpoint=foreign[0],
        )
    consumed, count = known.get(LOCAL_SOURCE, 0), source.count
    if consumed > count:
        raise InvalidError(
            "the store has consumed more of this input than there is: it is another input; give the same rows again with "
            "the new ones behind them, or begin with a new store",
            input=stream,
            rows=count,
            consumed=consumed,
        )
    if (stored := run.consumed_offsets(stream)) is not None:
        source.check_offsets(consumed, stored)
    if consumed:
        share = "all" if consumed == count else f"{consumed:,} of"
        run.note_skipped(stream, f"{share} {count:,} rows were consumed before")
    return _Input(stream, source, consumed)


def observe_rows(run: LocalRun, stream: str, rows: Rows | RowSource) -> None:
    """Let the watermark follow consumed rows that it has not observed, also rows of a run that was killed before this."""
    consumed = run.consumed(stream).get(LOCAL_SOURCE, 0)
    observed = min(run.observed(stream) or 0, consumed)
    is_stamped = isinstance(run.topology.injectors[stream].at, IngressTime)
    if observed < consumed and not is_stamped:
        position = InputPosition(stream=stream, source=LOCAL_SOURCE, batch=consumed, rows=consumed)
        unseen = source_of(rows).pieces(observed, BUNDLE_RECORDS_MAX)
        run.observe(stream, (piece for _, piece in unseen), position)
