"""The bundle: the work of one interval in one superstep, and its outcome.

One checkpoint covers many records (MillWheel §6.1.1). A `Bundle` goes into the
`IntervalProcessor` and a `BundleResult` comes out. Both are plain values, so the same core runs in a
Spark task, in the local runner and in the simulator.

Arrivals: the concatenated deliveries of a bundle, column by column, in order of arrival.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import ConcatenatedValues, PythonValues, Values
from millpond.executor.interval.letters import RetriedLetter, describe_value
from millpond.executor.pipeline.nodes import STRONG, WeakStreams
from millpond.executor.time.clocks import Clocks, PercentileTimes
from millpond.statestore.errors import check
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros, Superstep, WallTimeMicros, quickly_pickled


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """The records of one stream for one interval, column by column, in arrival order.

    Attributes:
        stream: the stream that they arrived on.
        keys: the consumer's keys, a string array without nulls.
        at: event times in microseconds, an int64 array as long as ``keys``.
        values: the values, as long as ``keys``.
        ids: ids of outside records (binary, nulls allowed: no deduplication), or ``None``.
    """

    stream: str
    keys: pa.Array
    at: npt.NDArray[np.int64]
    values: Values
    ids: pa.Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One interval's work in one superstep.

    Attributes:
        interval: the interval; every key lies in it.
        fence: owner and *new* commit number under which the result will be committed.
        superstep: number of the superstep.
        watermark: the computation's input low watermark during the whole bundle.
        wall_time: the superstep's wall time; tasks never read a clock.
        percentile_watermarks: the computation's percentile watermarks, all that the pipeline keeps.
        deliveries: the records, any number of streams.
        weak: which of its productions are delivered before the commit.
        settled: no record before this time comes in a later bundle; ``None``: that is known only up to ``watermark``.
        late_before: records before this time are late; ``None``: those before ``watermark``.
        retried: dead letters that are given once more, before all else.
    """

    interval: Interval
    fence: Fence
    superstep: Superstep
    watermark: EventTimeMicros
    wall_time: WallTimeMicros
    deliveries: Sequence[Deliveries] = ()
    percentile_watermarks: PercentileTimes = field(default_factory=dict)
    weak: WeakStreams = STRONG
    settled: EventTimeMicros | None = None
    late_before: EventTimeMicros | None = None
    retried: Sequence[RetriedLetter] = ()

    @property
    def until(self) -> EventTimeMicros:
        """The time up to which all records have arrived, including those of the bundle."""
        return self.watermark if self.settled is None else max(self.watermark, self.settled)

    @property
    def clocks(self) -> Clocks:
        """The clocks that the timers of the bundle wait for."""
        return Clocks(
            watermark=self.watermark,
            wall_time=self.wall_time,
            percentile_watermarks=self.percentile_watermarks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record or timer that user code could not process, kept with its error.

    Attributes:
        computation: the computation whose code failed, or the consumer of the unreadable record.
        stream: the record's stream, or ``""`` for a timer.
        key: its key; ``None`` if it has none.
        value: the record's value as JSON text; see `letter_value`.
        at: event time in microseconds, ``None`` when unreadable.
        error: one line.
        diagnostics: the traceback, cut to a bounded length.
        id: the record's id as its publisher gave it; ``None`` without one. Bytes that are not text are escaped.
        attempt: the number of the last attempt; 1 for a record that never reached the code.
        value_types: the types of the parts whose type JSON lacks, by their JSON pointers.
        id_base64: the id's bytes, where they are not text.
        retried: how often it has been given once more to the code, which has failed each time.
    """

    computation: str
    stream: str
    key: str | None
    value: str
    at: int | None
    error: str
    diagnostics: str = ""
    id: str | None = None
    attempt: int = 1
    value_types: Mapping[str, str] = field(default_factory=dict)
    id_base64: str | None = None
    retried: int = 0

    @classmethod
    def of_unreadable(
        cls,
        computation: str,
        stream: str,
        value: Callable[[], Any],
        error: str,
        *,
        key: str | None = None,
        at: int | None = None,
        record_id: bytes | None = None,
    ) -> Self:
        """The letter of a record that never reached the code.

        Args:
            computation: the record's consumer.
            stream: the record's stream.
            value: returns its value.
            error: why it cannot be read.
            key: its key, if it has one.
            at: its event time, if it has one.
            record_id: its id, if it has one.
        """
        described = describe_value(value)
        return cls(
            computation=computation,
            stream=stream,
            key=key,
            value=described.text,
            value_types=described.types,
            at=at,
            error=error,
            id=id_text(record_id),
            id_base64=id_base64(record_id),
        )


def id_text(record_id: bytes | None) -> str | None:
    """A record's id as text; bytes that are not text are escaped."""
    return None if record_id is None else record_id.decode(errors="backslashreplace")


def id_base64(record_id: bytes | None) -> str | None:
    r"""A record's id in base64 if its bytes are not text, so that `id_text` is not all of it.

    Example:
        >>> [id_base64(record_id) for record_id in (None, b"a7", b"\\xff")]
        [None, None, '/w==']
    """
    try:
        (record_id or b"").decode()
    except UnicodeDecodeError:
        return base64.b64encode(record_id or b"").decode()
    return None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStatistics:
    """The counts of one bundle.

    Attributes:
        dropped: the late records that were not passed to user code.
        weak: the productions that are delivered within the superstep.
        counters: the sums of the user's counters.
        waited: the records that began to wait in their rows for their turn in time.
        resumed: the waiting records of earlier bundles that were processed now.
        retried: the dead letters that were given once more; ``records`` and ``timers`` have them too.
    """

    records: int = 0
    late: int = 0
    dropped: int = 0
    duplicates: int = 0
    timers: int = 0
    keys: int = 0
    weak: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    waited: int = 0
    resumed: int = 0
    retried: int = 0


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionSummary:
    """A summary of a bundle's productions to one stream.

    Attributes:
        stream: the stream.
        count: the number of productions.
        oldest_at: their earliest event time.
        percentile_oldest_at: the oldest times when a share of the records is left out, for each percentile
            that the pipeline keeps.
    """

    stream: str
    count: int
    oldest_at: EventTimeMicros
    percentile_oldest_at: PercentileTimes = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The records of a bundle.

    Attributes:
        keys: the consumer's keys.
        at: event times.
        values: the values.
        ids: ids of outside records; ``None`` when no record has one.
        streams: the names of the streams, one per delivery.
        counts: how many records each delivery has.
    """

    keys: pa.StringArray
    at: npt.NDArray[np.int64]
    values: Values
    ids: pa.BinaryArray | None
    streams: Sequence[str]
    counts: Sequence[int]

    def __len__(self) -> int:
        return len(self.at)

    @staticmethod
    def of(deliveries: Sequence[Deliveries], *, with_ids: bool) -> Arrivals:
        """Concatenate deliveries.

        Args:
            deliveries: any number of deliveries, which may be empty.
            with_ids: whether to keep the record ids.
        """
        some = [delivery for delivery in deliveries if len(delivery.at)]
        for delivery in some:
            sizes = {len(delivery.keys), len(delivery.at), len(delivery.values)}
            check(len(sizes) == 1, "the columns of a delivery have one length", stream=delivery.stream)
            check(not delivery.keys.null_count, "delivered records have keys", stream=delivery.stream)
        return Arrivals(
            keys=_joined([_as(delivery.keys, pa.string()) for delivery in some], pa.string()),
            at=_times([delivery.at for delivery in some]),
            values=_values([delivery.values for delivery in some]),
            ids=_ids(some) if with_ids else None,
            streams=[delivery.stream for delivery in some],
            counts=[len(delivery.at) for delivery in some],
        )

    def streams_of(self, sources: npt.NDArray[np.int64]) -> Sequence[str]:
        """The streams of the records at the indices ``sources``."""
        if len(self.streams) <= 1:
            return [*self.streams] * len(sources)
        names = np.repeat(np.array(self.streams, dtype=object), self.counts)
        stream_names: list[str] = names[sources].tolist()
        return stream_names


def _joined(arrays: list[pa.Array], kind: pa.DataType) -> pa.Array:
    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _as(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if array.type == kind else array.cast(kind)


def _times(times: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    if len(times) == 1:
        return times[0]
    return np.concatenate(times) if times else np.empty(0, np.int64)


def _values(values: list[Values]) -> Values:
    if len(values) == 1:
        return values[0]
    return ConcatenatedValues(values) if values else PythonValues([])


def _ids(deliveries: list[Deliveries]) -> pa.BinaryArray | None:
    if all(delivery.ids is None for delivery in deliveries):
        return None
    ids = [
        pa.nulls(len(delivery.at), pa.binary()) if delivery.ids is None else _as(delivery.ids, pa.binary())
        for delivery in deliveries
    ]
    joined = _joined(ids, pa.binary())
    return None if joined.null_count == len(joined) else joined
