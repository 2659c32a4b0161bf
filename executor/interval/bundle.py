"""One interval's work in one superstep, and its outcome, as plain values.

One checkpoint covers many records (MillWheel §6.1.1). A `Bundle` goes into the `IntervalProcessor` and a
`BundleResult` comes out, so the same core runs in a Spark task, in the local runner and in the simulator.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import Values
from millpond.executor.interval.letters import RetriedLetter, describe_value
from millpond.executor.pipeline.nodes import STRONG, WeakStreams
from millpond.executor.time.clocks import PercentileTimes
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros, Superstep, WallTimeMicros, quickly_pickled


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """The records of one stream for one interval, column by column, in arrival order.

    Attributes:
        keys: the consumer's keys, a string array without nulls.
        at: event times in microseconds.
        ids: ids of outside records (binary; a null disables deduplication), or ``None``.
    """

    stream: str
    keys: pa.Array
    at: npt.NDArray[np.int64]
    values: Values
    ids: pa.Array | None = None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """One interval's part in a superstep, which travels to the tasks.

    Attributes:
        fence: owner and number of its next commit, under which the result will be committed.
        watermark: input low watermark of the computation for the whole superstep.
        files: the committed files with its rows, oldest first; empty unless requested.
        due: the interval has work without a record: a pending timer is due, or dead letters are retried.
        settled: no later superstep has a record before this time; ``None`` means ``watermark``.
        late_before: records before this time are late; ``None`` means ``watermark``.
        retried: dead letters of its keys to process once more, before all other input.
        last_event: the time of the pipeline's newest outside record, once all input has ended; ``None`` before.
    """

    interval: Interval
    fence: Fence
    watermark: EventTimeMicros
    files: tuple[LiveFile, ...] = ()
    due: bool = False
    percentile_watermarks: PercentileTimes = field(default_factory=dict)
    settled: EventTimeMicros | None = None
    late_before: EventTimeMicros | None = None
    retried: Sequence[RetriedLetter] = ()
    last_event: EventTimeMicros | None = None

    @property
    def late_until(self) -> EventTimeMicros:
        return self.watermark if self.late_before is None else self.late_before

    @property
    def until(self) -> EventTimeMicros:
        """The time up to which all records have arrived, including this superstep's."""
        return self.watermark if self.settled is None else max(self.watermark, self.settled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """One interval's work in one superstep: its plan, and the records for it.

    Attributes:
        wall_time: the superstep's wall time; tasks never read a clock.
        weak: the streams whose productions are delivered before the commit.
    """

    plan: IntervalPlan
    superstep: Superstep
    wall_time: WallTimeMicros
    deliveries: Sequence[Deliveries] = ()
    weak: WeakStreams = STRONG

    def restamped(self, fence: Fence, superstep: Superstep) -> Bundle:
        return replace(self, plan=replace(self.plan, fence=fence), superstep=superstep)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record or timer that user code could not process, kept with its error.

    Attributes:
        computation: the computation whose code failed, or the consumer of the unreadable record.
        stream: the record's stream, or ``""`` for a timer.
        value: the record's value as JSON text; see `letter_value`.
        at: event time in microseconds, ``None`` when unreadable.
        error: one line.
        diagnostics: the traceback, cut to a bounded length.
        id: the record's id; bytes that are not UTF-8 are escaped here and exact in ``id_base64``.
        attempt: the number of the last attempt; 1 for a record that never reached the code.
        value_types: the types that JSON lacks, by JSON pointer.
        retried: the number of failed retries of the letter.
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
        """Return the letter of a record that never reached the code; ``value`` reads its value, and may raise."""
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
    return None if record_id is None else record_id.decode(errors="backslashreplace")


def id_base64(record_id: bytes | None) -> str | None:
    """Return a record's id in base64 if it is not UTF-8, since `id_text` is lossy for it."""
    try:
        (record_id or b"").decode()
    except UnicodeDecodeError:
        return base64.b64encode(record_id or b"").decode()
    return None


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class BundleStatistics:
    """The counts of one bundle.

    ``dropped`` records were late and not passed to user code, ``weak`` productions were delivered within the
    superstep. ``waited`` records began to wait in their rows for their turn in time, ``resumed`` ones had waited since
    earlier bundles. ``records`` and ``timers`` also count the ``retried`` dead letters.
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
@dataclass(frozen=True, slots=True)
class ProductionSummary:
    """A summary of a bundle's productions to one stream.

    By percentile *p* it has the oldest time without the oldest 100 - *p* percent.
    """

    stream: str
    count: int
    oldest_at: EventTimeMicros
    percentile_oldest_at: PercentileTimes = field(default_factory=dict)
