"""Input admission: the outside input that a pipeline accepts, and warnings about input that is probably mistaken.

A store finds a row by the text of its key, so a key of other columns or types would find no row. The columns of typed
keys are recorded in the table with the first input that shows them, one word by computation, and required from then
on. A computation without a record has plain keys.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from millpond.executor.computation.values import printable
from millpond.executor.inputs.extraction import InjectorNode, Rows
from millpond.executor.inputs.keys import KeyExtractor, key_names
from millpond.executor.inputs.positions import (
    BOUNDED_SOURCE,
    admit_batch,
    consumed_elsewhere,
    input_positions,
    recorded_place,
)
from millpond.executor.interval.row_update import Manifest
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.options import PipelineOptions
from millpond.executor.superstep.plan import InputPosition
from millpond.executor.superstep.report import Totals
from millpond.executor.time.instants import EPOCH, INSTANT_MAX_US, INSTANT_MIN_US
from millpond.executor.time.observations import DEFAULT_MEMBER, InputObservation
from millpond.executor.time.watermark_policies import IngressTime
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import AppId
from millpond.statestore.durations import duration_text
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.key_columns import (
    key_columns_in,
    key_columns_of,
    key_word,
    same_texts,
    told_kind,
)
from millpond.statestore.rows.key_text import is_typed
from millpond.statestore.store import Store

_LOG: Final = logging.getLogger("millpond")


class InputAdmission:
    """Comparison of outside inputs with the positions that the store has consumed."""

    def __init__(
        self, store: Store, topology: Topology, watermarks: PipelineWatermarks, options: PipelineOptions
    ) -> None:
        self._store = store
        self._topology = topology
        self._watermarks = watermarks
        self._options = options

    def admit(self, position: InputPosition) -> bool:
        """Return True if a batch is new; see `admit_batch`."""
        accept, known = self._options.accept_checkpoint, self.consumed(position.stream)
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
        return input_positions(self._store.committer.snapshot.txns, self._topology.name, stream)

    def offsets(self, stream: str, source: str) -> str | None:
        """Return the source's own words for its consumed position, if it gave any."""
        app_id = AppId.INPUT.of(self._topology.name, stream, source)
        return self._store.committer.snapshot.source_offsets.get(app_id)

    @property
    def closed(self) -> frozenset[str]:
        """The injected streams that accept no more records, because an earlier run has ended their input."""
        return frozenset() if self._options.accept_ended else self._watermarks.ended_before

    def input_rows(self, stream: str) -> int | None:
        """Return the number of rows of a bounded input that count towards its watermark, if it is known."""
        positions = self._store.committer.snapshot.txns
        return positions.get(AppId.INPUT_ROWS.of(self._topology.name, stream))

    def bounded_place(self, stream: str) -> dict[str, Any]:
        """Return what was recorded about the consumed part of a bounded frame; empty if nothing was.

        With ``until`` that part ends before this time, else it is the whole frame.
        """
        batch, offsets = self.consumed(stream).get(BOUNDED_SOURCE), self.offsets(stream, BOUNDED_SOURCE)
        if batch is None or offsets is None:
            return {}
        place = recorded_place(offsets, self.input_rows(stream))
        if not place or place.get("batch", 0) != batch:
            raise InvalidError(
                "the store was repaired to the middle of a bounded frame, and does not record where that is: `millpond rewind` "
                "it to a version before",
                input=stream,
                batch=batch,
            )
        return place


_SECONDS_MIN: Final = 1_262_304_000
"""The year 2010 in seconds; in microseconds it is 21 minutes after 1970 begins."""

_SECONDS_MAX: Final = 2_208_988_799
"""The end of 2039 in seconds; in microseconds it is 37 minutes after 1970 begins."""

_FEW_RECORDS: Final = 10
"""So many records in one quarter of an hour of 1970 are no examples any more."""

_AHEAD_US: Final = 366 * 86_400_000_000
"""Clocks and zones differ by less than a day; bookings are made for months ahead."""


def check_seconds(node: InjectorNode, records: int, oldest: int, newest: int) -> None:
    """Refuse the first records of a stream if all of their times are dates in seconds, taken for microseconds.

    A few records are accepted with a warning, because they may be examples.
    """
    if not node.is_unit_assumed or not records or oldest < _SECONDS_MIN or newest > _SECONDS_MAX:
        return
    refusal = InvalidError(
        "the times of the stream all lie in the first hour of 1970, as dates in seconds do that are taken for "
        'microseconds: say inject(..., at_unit="s"), or at_unit="us" if they mean 1970',
        stream=node.stream,
        oldest=oldest,
        newest=newest,
    )
    if records >= _FEW_RECORDS:
        raise refusal
    _LOG.warning("%s", refusal)


class SuspectTimes:
    """Looks for possible but unlikely event times, once per stream.

    Times in seconds, read as microseconds, lie in the first hour of 1970; see `check_seconds`. A time far ahead of the
    clock moves the watermark there, so that all later records are late: it may be meant, so it is accepted with a warning.
    ``in_1970`` counts, by stream, the committed records with times in that year.
    """

    def __init__(self, topology: Topology, in_1970: Counter[str]) -> None:
        self._in_1970 = in_1970
        self._timed = {
            name: node for name, node in topology.injectors.items() if not isinstance(node.at, IngressTime)
        }
        self._new = set(self._timed)
        self._on_time = set(self._timed)

    def check(self, inputs: Sequence[InputObservation]) -> None:
        """Check the observations of a superstep before its commit; see `check_seconds`."""
        for stream, (records, oldest, newest) in _bounds(inputs, self._new).items():
            self._new.discard(stream)
            check_seconds(self._timed[stream], records, oldest, newest)

    def observe(self, inputs: Sequence[InputObservation], now_us: int) -> None:
        """Check the observations of a committed superstep, of which a stream may have several."""
        for seen in inputs:
            if seen.in_1970 and seen.stream in self._timed:
                self._in_1970[seen.stream] += seen.in_1970
        for stream, (_, _, newest) in _bounds(inputs, self._on_time).items():
            if newest > now_us + _AHEAD_US:
                self._on_time.discard(stream)
                shown = [datetime.fromtimestamp(at // 1_000_000, UTC).isoformat() for at in (newest, now_us)]
                _LOG.warning(
                    "a record's time lies more than a year ahead of the clock, and the watermark may follow it, so that "
                    "all that comes after is late: look at the unit of the times, or leave such records out: stream=`%s` "
                    "newest=`%s` now=`%s`",
                    stream,
                    *shown,
                )


def _bounds(inputs: Sequence[InputObservation], streams: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """Return the number of records, the oldest and the newest time of each of these streams."""
    found: dict[str, tuple[int, int, int]] = {}
    for seen in inputs:
        times = seen.times
        if times is not None and seen.stream in streams:
            records, oldest, newest = found.get(seen.stream, (0, times.oldest_at, times.newest_at))
            found[seen.stream] = (
                records + seen.records, min(oldest, times.oldest_at), max(newest, times.newest_at),
            )  # fmt: skip
    return found


class UnsetStates:
    """Warnings about states that code changed in place and did not set, once per computation."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def observe(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            key, computation = manifest.result.unset, manifest.interval.computation
            if key is not None and computation not in self._warned:
                self._warned.add(computation)
                _LOG.warning(
                    "a state was changed in place, and the change is lost: only context.state.set saves it, so call that "
                    "after the change, or change a copy if it is not to be saved: computation=`%s` key=`%s`; later ones "
                    "of this computation are not reported",
                    computation,
                    printable(key),
                )


_DROPPED_SHARE: Final = 100
"""One in so many injected records may come too late without a word, and one of fewer."""


class LateRecords:
    """Warnings about dropped records, which otherwise only a counter would show, each once in a run.

    Rows of a stream without a declared watermark are assumed to arrive in the order of their times. If they do not,
    windows close before their rows arrive. And one sender with a fast clock moves the watermark past all others.
    """

    def __init__(self, topology: Topology, watermarks: PipelineWatermarks) -> None:
        self._topology = topology
        self._watermarks = watermarks
        self._fed = {
            stream: topology.reached_from([stream])
            for stream, node in topology.injectors.items()
            if node.is_assumed
        }
        self._injected = 0
        self._dropped = Counter[str]()
        self._has_warned = False

    def observe(self, counts: Totals, now_us: int) -> None:
        self._injected += counts.injected
        self._dropped.update(
            {name: counted.get("dropped", 0) for name, counted in counts.by_computation.items()}
        )
        # Of a bounded input the rows are observed at its end, after some were dropped.
        if self._is_told_of_order() or not counts.dropped or self._has_warned:
            return
        # Of each computation alone, because the records of other steps say nothing about its share.
        dropped = max(self._dropped.values())
        if dropped * _DROPPED_SHARE > max(self._injected, _DROPPED_SHARE):
            self._has_warned = True
            self._tell_of_share(dropped, now_us)

    def _tell_of_share(self, dropped: int, now_us: int) -> None:
        stream = max(self._topology.injectors, key=self._watermarks.injector_watermark)
        newest = self._watermarks.watch(stream).newest
        member = max(newest, key=newest.__getitem__, default=DEFAULT_MEMBER)
        watermark = self._watermarks.injector_watermark(stream)
        ahead = f" ahead_of_the_clock=`{duration_text(watermark - now_us)}`" if watermark > now_us else ""
        _LOG.warning(
            "more than one in a hundred records of this run came too late and are dropped: look for a sender whose clock is "
            "fast, because the newest time moves the watermark for all, and bound it with inject(..., ahead_max=); or allow "
            "more lateness, or declare a watermark by percentile: dropped=`%s` records=`%s` stream=`%s` member=`%s` watermark=`%s`%s",
            dropped,
            self._injected,
            stream,
            member or "the only one",
            (EPOCH + timedelta(microseconds=min(max(watermark, INSTANT_MIN_US), INSTANT_MAX_US))).isoformat(),
            ahead,
        )

    def _is_told_of_order(self) -> bool:
        for stream, fed in list(self._fed.items()):
            behind_us = self._watermarks.behind_us(stream)
            dropped = {name: count for name, count in self._dropped.items() if name in fed and count}
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
            self._has_warned = True
        return self._has_warned


ROWS_READ: Final = 100
"""Number of mappings whose values determine the types of their fields."""

_WAYS_OUT: Final = (
    "take the former key= again, or start a computation of another name and drop= this one in the pipeline, or begin with a "
    "new store"
)


class KeyColumns:
    """The columns of a pipeline's typed keys: recorded at first sight, and required to stay the same."""

    def __init__(self, store: Store, topology: Topology, ownership: Ownership) -> None:
        self._store = store
        self._topology = topology
        self._ownership = ownership
        self._seen: dict[tuple[str, str | None], tuple[pa.Field, ...]] = {}

    def record(self, stream: str, rows: Rows, only: str | None = None) -> None:
        """Record the key columns of some outside rows, before the rows are read.

        The schema of a table counts, or the first `ROWS_READ` mappings. ``only`` one computation may get the rows.
        """
        seen = self._seen.get((stream, only))
        if seen is not None and (not isinstance(rows, pa.Table) or seen == tuple(rows.schema)):
            return
        if isinstance(rows, pa.Table):
            self.record_columns(stream, tuple(rows.schema), only)
        elif rows:
            names = {name for key in self._keys(stream, only).values() for name in key_names(key)}
            some = [row for row in islice(rows, ROWS_READ) if isinstance(row, Mapping)]
            fields = tuple(pa.field(name, told_kind(row.get(name) for row in some)) for name in sorted(names))
            self.record_columns(stream, fields, only)
            if any(pa.types.is_null(field.type) for field in fields):
                del self._seen[stream, only]

    def is_known(self, stream: str, only: str | None = None) -> bool:
        """Return True if columns of a stream have been recorded in this run."""
        return (stream, only) in self._seen

    def record_columns(self, stream: str, columns: Sequence[pa.Field], only: str | None = None) -> None:
        by_name = {column.name: column for column in columns}
        snapshot = self._store.committer.snapshot
        records: dict[str, int] = {}
        for computation, key in self._keys(stream, only).items():
            names = key_names(key)
            if names and by_name.keys() >= set(names):
                given = key_columns_of(by_name[name] for name in names)
                is_plain = isinstance(key, str) and pa.types.is_string(given[0].type)
                word = self._checked(snapshot, computation, stream, given, is_plain=is_plain)
                if word is not None:
                    records[AppId.KEY_COLUMNS.of(computation, word)] = snapshot.version + 1
        if records:
            self._ownership.record(records)
        self._seen[stream, only] = tuple(columns)

    def _keys(self, stream: str, only: str | None) -> Mapping[str, KeyExtractor]:
        own = self._topology.injectors[stream].key
        return {
            consumer.computation.name: own if consumer.subscription.key is None else consumer.subscription.key
            for consumer in self._topology.consumers_of(stream)
            if only in (None, consumer.computation.name)
        }

    def _checked(
        self, snapshot: Snapshot, name: str, stream: str, given: tuple[pa.Field, ...], *, is_plain: bool
    ) -> str | None:
        """Return the word to record, unless the table has it or the key is plain."""
        stored = key_columns_in(snapshot.txns, name)
        if is_plain or (len(given) == 1 and not stored and pa.types.is_null(given[0].type)):
            if is_plain and stored:
                raise _refused(
                    "the computation's rows have typed keys, and its key is text now", name, stored, given
                )
            return None
        if not stored:
            bounds = (bound for file in snapshot.files_in(name) for bound in (file.min_key, file.max_key))
            if any(bound is not None and not is_typed(bound) for bound in bounds):
                raise _refused(
                    "the computation's rows have plain text as keys, and its key is typed now",
                    name,
                    (),
                    given,
                )
            return key_word(given)
        if len(stored) != len(given):
            raise _refused(
                "the computation's key is made of another number of columns now", name, stored, given
            )
        for before, now in zip(stored, given, strict=True):
            if not same_texts(before.type, now.type):
                raise _refused("a column of the computation's key has another type now", name, stored, given)
        wanted = tuple(
            now if not pa.types.is_null(now.type) else now.with_type(before.type)
            for before, now in zip(stored, given, strict=True)
        )
        is_first = self._topology.computations[name].rank(stream) == 0
        is_told = any(pa.types.is_null(before.type) for before in stored)
        return key_word(wanted) if wanted != stored and (is_first or is_told) else None


def _refused(
    what: str, computation: str, stored: Sequence[pa.Field], given: Sequence[pa.Field]
) -> InvalidError:
    return InvalidError(
        f"{what}, so they would not be found: {_WAYS_OUT}",
        computation=computation,
        **({"stored": key_word(stored)} if stored else {}),
        key=key_word(given),
    )
