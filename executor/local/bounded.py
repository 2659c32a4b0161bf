"""Bounded input: cut into pieces, whose remaining rows say how far event time has passed.

All rows are known from the beginning, so the low watermark of an input is the least time of its remaining rows:
exact, whatever their order, and no record is late. Where rows are nearly sorted, windows close and timers fire on the
way instead of all at the end. Where code sets timers, a long silence ends a piece too. Of several inputs the one
furthest behind continues. Only a piece of each input needs to be in memory: a source of rows is read once for its
times, and once more to consume it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from millpond.executor.inputs.extraction import (
    InjectorNode,
    Rows,
    oldest_time,
    readable_times,
    rows_between,
    silences,
)
from millpond.executor.inputs.positions import (
    BOUNDED_SOURCE,
    LOCAL_SOURCE,
    consumed_before,
    digest_in,
    digest_place,
    recorded_place,
)
from millpond.executor.inputs.row_digest import added, rows_digest
from millpond.executor.local.rows import RowSource, source_of
from millpond.executor.local.run import LocalRun
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.admission import check_seconds
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.time.clocks import PercentileTimes
from millpond.executor.time.watermark_policies import IngressTime, ManualWatermark, Perfect
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros

_BEGINNING: Final = EventTimeMicros(TIME_MIN_US)
_END: Final = EventTimeMicros(TIME_MAX_US)
_SILENCE_SHARE: Final = 64
"""A silence of more than this part of a piece's time ends a superstep, so that timers fire within it."""

_PLACES: Final = ("file", "row", "files_before")
_WAYS_OUT: Final = (
    "give the same rows again with the new ones behind them, and name new files so that they come last; or hand over new "
    "rows alone, with start(pipeline) and inject; or begin with a new store"
)
_STILL_WRITTEN: Final = "; if the last file was still being written, rewind the store, and give --settle"


@dataclass(slots=True)
class InputRest:
    """The rest of an input.

    Attributes:
        digest: of the rows before, by which a later run knows them again; ``None`` if those were never seen.
        part_digest: of the rows before the present part of the source.
        oldest: the least time of each remaining piece and all after it.
        shares: by the number of rows before a piece, the percentile watermarks that it meets.
        cuts: by the number of rows before a piece of the source, the rows of it before which a further piece begins.
    """

    stream: str
    source: RowSource
    consumed: int
    digest: int | None = 0
    part_digest: int | None = 0
    oldest: list[EventTimeMicros] = field(default_factory=list)
    at: int = 0
    shares: Mapping[int, PercentileTimes] = field(default_factory=dict)
    cuts: dict[int, list[int]] = field(default_factory=dict)
    _rest: Iterator[tuple[int, Rows]] | None = None

    @property
    def is_left(self) -> bool:
        return self.consumed < self.source.count

    @property
    def oldest_at(self) -> EventTimeMicros:
        if not self.is_left:
            return _END
        return self.oldest[self.at] if self.oldest else _BEGINNING

    def measure(self, node: InjectorNode, arrived_at: EventTimeMicros, *, cuts_silences: bool) -> None:
        start, times = self.consumed, list[EventTimeMicros | None]()
        for count, piece in self.source.read_pieces(start, BUNDLE_RECORDS_MAX):
            if cuts_silences:
                self.cuts[start] = silences(node, piece, arrived_at, _SILENCE_SHARE)
            parts = self._parts(start, count, piece)
            times += [oldest_time(node, part, arrived_at) for _, part in parts]
            start += count
        oldest, found = _END, list[EventTimeMicros]()
        for at in reversed(times):
            oldest = oldest if at is None else min(oldest, at)
            found.append(oldest)
        self.oldest = found[::-1]

    def _parts(self, start: int, count: int, piece: Rows) -> Iterator[tuple[int, Rows]]:
        if not (cuts := self.cuts.get(start)):
            return iter(((count, piece),))
        ends = pairwise((0, *cuts, count))
        return ((end - begin, rows_between(piece, begin, end)) for begin, end in ends)

    def _pieces(self) -> Iterator[tuple[int, Rows]]:
        start = self.consumed
        for count, piece in self.source.pieces(start, BUNDLE_RECORDS_MAX):
            yield from self._parts(start, count, piece)
            start += count

    def consume(self, run: LocalRun, watermarks: Mapping[str, EventTimeMicros]) -> None:
        if self._rest is None:
            self._rest = self._pieces()
        count, piece = next(self._rest)
        self._digest(piece, self.consumed + count)
        self.consumed += count
        self.at += 1
        position = InputPosition(
            stream=self.stream, source=LOCAL_SOURCE, batch=self.consumed, offsets=self._place()
        )
        # What returns on a feedback must not find that time has passed: it passes in steps, and sorted records wait.
        is_promised = self.oldest and run.topology.sorts and not run.topology.has_feedback
        after = {self.stream: self.oldest_at} if is_promised else {}
        run.pass_time(watermarks)
        if shares := self.shares.get(self.consumed - count):
            run.advance_percentiles(self.stream, shares)
        rows = self.source.read(piece)
        run.consume(self.stream, rows, position, watermarks=watermarks, after=after)

    def skip_to(self, stop: int) -> None:
        """Read rows that were consumed before, for their digest."""
        for count, rows in (
            self.source.pieces(self.consumed, BUNDLE_RECORDS_MAX) if self.consumed < stop else ()
        ):
            taken = min(count, stop - self.consumed)
            self._digest(rows_between(rows, 0, taken), self.consumed + taken)
            self.consumed += taken
            if self.consumed == stop:
                return

    def _digest(self, piece: Rows, stop: int) -> None:
        at = begin = self.consumed
        for end in (*self.source.part_ends(at, stop), stop):
            if self.digest is not None:
                self.digest = added(
                    self.digest, rows_digest(rows_between(piece, at - begin, end - begin), at)
                )
            at = end
            if end < stop:
                self.part_digest = self.digest

    def _place(self) -> str:
        parts = {"part_digest": f"{self.part_digest:016x}"} if self.part_digest else {}
        return digest_place(self.consumed, self.digest, **self.source.place(self.consumed), **parts)


def rest_of_inputs(run: LocalRun, given: Mapping[str, Rows | RowSource]) -> list[InputRest]:
    """Return the parts of the inputs that the store has not consumed; positions count rows.

    Raises:
        InvalidError: the consumed rows are not the first of an input.
    """
    rests = (_rest_of(run, stream, source_of(rows)) for stream, rows in given.items())
    return [rest for rest in rests if rest is not None]


def consume_inputs(run: LocalRun, inputs: Sequence[InputRest], *, finish: bool) -> None:
    """Consume the rest of the inputs in supersteps.

    Without ``finish`` more rows may follow, so only the policies move watermarks.
    """
    topology = run.topology
    run.expect_bounded_input()
    is_cut = any(one.source.count - one.consumed > BUNDLE_RECORDS_MAX for one in inputs)
    waits_for_timers = any(
        node.sets_timers and not node.time_sorted and not node.computation.in_micro_batches
        for node in topology.computations.values()
    )
    if finish and not topology.has_unbounded_horizon and (topology.sorts or is_cut or waits_for_timers):
        for one in inputs:
            node = topology.injectors[one.stream]
            # Rows without event times, and a watermark that no time moves, have nothing to follow.
            if not isinstance(node.at, IngressTime) and not isinstance(
                node.watermark, Perfect | ManualWatermark
            ):
                arrived_at = run.arrived_at()
                one.measure(node, arrived_at, cuts_silences=waits_for_timers)
                one.shares = _shares(topology, one.stream, one.source, arrived_at)
    while left := [one for one in inputs if one.is_left]:
        known = {one.stream: one.oldest_at for one in inputs if one.oldest}
        min(left, key=lambda one: one.oldest_at).consume(run, known)


def _shares(
    topology: Topology, stream: str, source: RowSource, arrived_at: EventTimeMicros
) -> dict[int, PercentileTimes]:
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
    for count, piece in source.read_pieces(0, BUNDLE_RECORDS_MAX):
        at = readable_times(node, piece, arrived_at)
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


def _rest_of(run: LocalRun, stream: str, source: RowSource) -> InputRest | None:
    known = run.consumed(stream)
    if BOUNDED_SOURCE in known:
        run.check_rows(stream, source.first(BUNDLE_RECORDS_MAX))
        run.note_skipped(stream, consumed_before(stream, source.count, run.observed(stream)))
        return None
    foreign = sorted(set(known) - {LOCAL_SOURCE})
    if foreign:
        raise InvalidError(
            "this store has consumed the input through a streaming checkpoint; go on with it, or start a new store",
            input=stream,
            checkpoint=foreign[0],
        )
    consumed = known.get(LOCAL_SOURCE, 0)
    rest = _continued(stream, source, consumed, recorded_place(run.consumed_offsets(stream), consumed))
    _check_first(
        run, stream, next((rows for _, rows in source.read_pieces(consumed, BUNDLE_RECORDS_MAX)), [])
    )
    if consumed:
        share = "all" if consumed == source.count else f"{consumed:,} of"
        run.note_skipped(stream, f"{share} {source.count:,} rows were consumed before")
    return rest


def _check_first(run: LocalRun, stream: str, rows: Rows) -> None:
    run.check_rows(stream, rows)
    node = run.topology.injectors[stream]
    if node.is_unit_assumed and len(at := readable_times(node, rows)):
        check_seconds(node, len(at), int(at.min()), int(at.max()))


def _continued(stream: str, source: RowSource, consumed: int, place: Mapping[str, Any]) -> InputRest:
    """Return the rest of an input that begins with the consumed rows, and refuse another."""
    known = source.resume(consumed, place)
    if consumed > source.count:
        raise InvalidError(
            f"the store has consumed more of this input than there is: it is another input; {_WAYS_OUT}",
            input=stream,
            rows=source.count,
            consumed=consumed,
        )
    digest, part_digest = digest_in(place), digest_in(place, "part_digest") or 0
    rest = InputRest(stream, source, known)
    if known and digest is not None:
        # Read only the part in which the consumed rows end, because the source knows its beginning again.
        rest.digest, rest.part_digest = (digest if known == consumed else part_digest), part_digest
    elif known:
        rest.digest = None
    rest.skip_to(consumed)
    now = source.place(consumed)
    is_same = (
        rest.digest == digest
        if digest is not None
        # Written by an earlier version: only the names and numbers of files can be compared.
        else all(place[name] == now[name] for name in _PLACES if name in place and name in now)
    )
    if not is_same:
        raise InvalidError(
            f"the rows that were consumed before are not the first {consumed:,} of this input, so there is no telling "
            f"which rows are new; {_WAYS_OUT}{_STILL_WRITTEN if 'file' in place else ''}",
            input=stream,
            consumed=consumed,
            **_shown("consumed_to", place),
            **_shown("now", now),
        )
    return rest


def _shown(name: str, place: Mapping[str, Any]) -> dict[str, str]:
    parts = [place.get(part) for part in _PLACES]
    return {name: "row {1} of {0}, after {2} files".format(*parts)} if None not in parts else {}


def observe_rows(run: LocalRun, stream: str, rows: Rows | RowSource) -> None:
    """Let the watermark follow consumed rows that it has not observed, also rows of a run that was killed before this."""
    consumed = run.consumed(stream).get(LOCAL_SOURCE, 0)
    observed = min(run.observed(stream) or 0, consumed)
    is_stamped = isinstance(run.topology.injectors[stream].at, IngressTime)
    if observed < consumed and not is_stamped:
        position = InputPosition(stream=stream, source=LOCAL_SOURCE, batch=consumed, rows=consumed)
        unseen = source_of(rows).read_pieces(observed, BUNDLE_RECORDS_MAX)
        run.observe(stream, (piece for _, piece in unseen), position)
