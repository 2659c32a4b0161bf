"""What the driver tells the tasks of a superstep, and what each task reports back.

The columns of a routed row: those that routing adds, and the input's own.

Rows are shuffled and converted to Arrow, so no value is copied: if the key, the time or the id is
a column of the input, the task reads that column.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.payload import Payload
from millpond.executor.interval.bundle import DeadLetter
from millpond.executor.interval.row_update import Manifest
from millpond.executor.interval.worker import IntervalPlan
from millpond.executor.pipeline.nodes import WeakStreams
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.time.instants import DEFAULT_READING, TimeReading
from millpond.executor.time.observations import InputObservation, Watch
from millpond.statestore.app_ids import RESTORED_APP_ID
from millpond.statestore.errors import MillpondError
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.system import collector_paused
from millpond.statestore.types import Durability, Superstep, WallTimeMicros, quickly_pickled

if TYPE_CHECKING:
    from millpond.executor.pipeline.nodes import ComputationNode
    from millpond.statestore.store import Store


TARGET: Final = "__millpond_target"
"""
Where a row goes, as an integer: `readable_target` of the interval that owns its key, or
`unreadable_target` of its consumer's first interval if it has no readable key or time.
"""

KEY: Final = "__millpond_key"
AT: Final = "__millpond_at"
ID: Final = "__millpond_id"
ERROR: Final = "__millpond_error"

PRODUCTIONS: Final = "__millpond_productions"
"""Productions for a slot, as one Arrow stream; null in a row from outside. Its target is any position of the slot."""

POSITION_SQL: Final = f"CASE WHEN {TARGET} < 0 THEN -1 - {TARGET} ELSE {TARGET} END"
"""`position_of` of the column `TARGET`, in Spark SQL."""

READABLE_SQL: Final = f"{TARGET} >= 0"
"""`is_readable` of the column `TARGET`, in Spark SQL."""


def readable_target(position: int) -> int:
    """The target of a record for the interval at a position of the plan."""
    return position


def unreadable_target(position: int) -> int:
    """The target of an unreadable record that the interval's task at this position reports.

    Example:
        >>> [position_of(unreadable_target(position)) for position in (0, 7)]
        [0, 7]
    """
    return -1 - position


def is_readable(target: int) -> bool:
    """Whether a target is that of a record with a key and a time."""
    return target >= 0


def position_of(target: int) -> int:
    """The position in the plan of the interval that a target names, readable or not."""
    return target if is_readable(target) else -1 - target


def readable_rows(targets: Any) -> Any:
    """`is_readable` of each element of an Arrow array, as an Arrow array."""
    return pc.greater_equal(targets, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedColumns:
    """Which column of a routed row has which part of the record.

    Attributes:
        key: column of the key, text.
        at: column of the event time: a timestamp, or a number of microseconds.
        id: column of the record id, text, binary or a number; ``None`` if records have none.
        error: column with the reason why a record is unreadable; ``None`` if a null key or time says so.
        own: the input's own columns, which make up a record's value.
        sign: column that says whether a row is new or taken back; ``None`` if the rows are no changes.
        raw_at: the column that the event time was made of, to say why it is unreadable; ``None`` if ``error``
            says so, or if records are stamped on arrival.
        key_parts: what typed keys were made of, by the position of their consumer's first interval, to say why one is
            null.
    """

    key: str
    at: str
    id: str | None
    error: str | None
    own: tuple[str, ...]
    raw_at: str | None = None
    sign: str | None = None
    key_parts: Mapping[int, str | tuple[str, ...]] = field(default_factory=dict)


SlotParts: TypeAlias = Mapping[int, IntervalPlan]
"""What a slot runs in a superstep, by position; the position modulo the number of slots is the slot."""

_CODEC: Final = "zstd"
_LENGTH_BYTES: Final = 8

SLOT_REPORT_SCHEMA: Final = "report binary"
"""Schema of the frame that tasks yield: one pickled `SlotReport` a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInput:
    """The outside input whose records the partitions contain.

    Attributes:
        stream: the injected stream.
        columns: which column has which part of a record.
        first_targets: positions of the first consumer's intervals, so that each record is counted once.
        id_scopes: prefix of record ids, by consumer.
        watch: what the driver needs to know of the records' times.
        injector: the pickled injector, if its watermark depends on more than times.
        payload: what decodes the records' values; ``None``: the rows are the values.
        times: how the injector reads times that do not say their unit or zone.
    """

    stream: str
    columns: RoutedColumns
    first_targets: frozenset[int]
    id_scopes: Mapping[str, bytes]
    watch: Watch
    injector: bytes | None = None
    payload: Payload | None = None
    times: TimeReading = DEFAULT_READING


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetting:
    """What a worker process is made for: a store, and the code of a pipeline.

    Attributes:
        url: root of the rows table.
        storage_options: credentials and endpoints to open it.
        durability: what files survive before they are reported to the driver.
        code: the pickled computations by name.
        code_digest: a hash of ``code``; a worker process that has loaded it does not unpickle it again.
        cache_bytes: soft-state budget of a worker process, in bytes.
        disk: whether row files are kept on the machine's disk.
        restored_at: the version in which the table was last repaired or rewound: soft state from before it is not
            true any more.
    """

    url: str
    storage_options: Mapping[str, str]
    durability: Durability
    code: bytes
    code_digest: str
    cache_bytes: int
    disk: DiskOptions = field(default_factory=DiskOptions)
    restored_at: int = 0

    @classmethod
    def of(
        cls,
        store: Store,
        computations: Mapping[str, ComputationNode],
        cache_bytes: int,
        disk: DiskOptions,
    ) -> Self:
        """The setting of a pipeline's tasks.

        Args:
            store: the open store.
            computations: the pipeline's, by name.
            cache_bytes: soft-state budget of a worker process, in bytes.
            disk: whether row files are kept on the machine's disk.
        """
        code = cloudpickle.dumps(dict(computations))
        return cls(
            url=store.objects.url,
            storage_options=dict(store.storage_options),
            durability=store.durability,
            code=code,
            code_digest=hashlib.sha256(code).hexdigest(),
            cache_bytes=cache_bytes,
            disk=disk,
            restored_at=store.committer.snapshot.txns.get(RESTORED_APP_ID, 0),
        )

    @property
    def name(self) -> tuple[str, ...]:
        """What tells it from other settings."""
        kept = str(self.cache_bytes), str(self.disk), str(self.restored_at)
        return self.url, self.durability, self.code_digest, *kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHomes:
    """How the worker processes of an executor find the one that has a slot's soft state.

    Attributes:
        secret: known to the run's tasks alone.
        slots_max: how many slots a process is home to.
    """

    secret: str
    slots_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The instructions for all tasks of one superstep.

    Attributes:
        setting: the store and the code.
        superstep: number of the superstep.
        wall_time: wall time of the whole superstep.
        slots: number of slots.
        parts: the packed `SlotParts` of each slot that has work, so that a task reads only its own.
        sources: committed files with undelivered productions.
        input: the outside input of this superstep, if any.
        weak: which productions are delivered before the commit, by computation.
        handed_on: uncommitted files of this superstep, with weak productions.
        homes: how tasks find the process of their slot; ``None``: each runs where it is.
    """

    setting: WorkerSetting
    superstep: Superstep
    wall_time: WallTimeMicros
    slots: int
    parts: Mapping[int, bytes]
    sources: tuple[ProductionSource, ...]
    input: RoutedInput | None
    weak: Mapping[str, WeakStreams] = field(default_factory=dict)
    handed_on: tuple[ProductionSource, ...] = ()
    homes: ProcessHomes | None = None

    def parts_of(self, slot: int) -> SlotParts:
        """What a slot runs; nothing if it has no work."""
        packed = self.parts.get(slot)
        return {} if packed is None else _unpacked(packed)

    def to_neighbour(self, slot: int) -> bytes:
        """What another process of the same setting needs to know to run a slot."""
        mine = {slot: self.parts[slot]} if slot in self.parts else {}
        return pickle.dumps((slot, replace(self, setting=replace(self.setting, code=b""), parts=mine)))

    @staticmethod
    def from_neighbour(packed: bytes) -> tuple[int, TaskPlan]:
        """The slot and the plan of `to_neighbour`, whose sender has proved that it is one."""
        slot, plan = pickle.loads(packed)  # noqa: S301 - see above
        return slot, plan


@collector_paused()
def pack_parts(parts: SlotParts, slots: int) -> dict[int, bytes]:
    """The parts of all intervals, by slot: pickled and compressed, for every executor gets all of them."""
    by_slot: dict[int, dict[int, IntervalPlan]] = {}
    for position, part in parts.items():
        by_slot.setdefault(position % slots, {})[position] = part
    return {slot: _packed(mine) for slot, mine in by_slot.items()}


def _packed(parts: SlotParts) -> bytes:
    pickled = pickle.dumps(parts)
    compressed: bytes = pa.compress(pickled, _CODEC, asbytes=True)
    return len(pickled).to_bytes(_LENGTH_BYTES) + compressed


def _unpacked(packed: bytes) -> SlotParts:
    length, compressed = int.from_bytes(packed[:_LENGTH_BYTES]), packed[_LENGTH_BYTES:]
    pickled = pa.decompress(compressed, length, _CODEC, asbytes=True)
    parts: SlotParts = pickle.loads(pickled)  # noqa: S301 - written by our own driver
    return parts


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """The answer of one task to the driver.

    Attributes:
        slot: the slot that it ran.
        manifests: one per interval that had work.
        dead_letters: unreadable records.
        inputs: counts and times of the outside input.
        failure: the error that ended the task, if another attempt would fail in the same way.
        process: which process ran it: a home is where a slot ran before.
        read_bytes: how much it read of row files.
    """

    slot: int
    manifests: tuple[Manifest, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    inputs: tuple[InputObservation, ...] = ()
    failure: MillpondError | None = None
    process: str = ""
    read_bytes: int = 0

    def to_bytes(self) -> bytes:
        """The report, pickled."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(packed: bytes) -> SlotReport:
        """The report of `to_bytes`, from a process that is known to be one of our tasks'."""
        report: SlotReport = pickle.loads(packed)  # noqa: S301 - see above
        return report

    def to_batch(self) -> pa.RecordBatch:
        """The report as a row of `SLOT_REPORT_SCHEMA`."""
        return pa.RecordBatch.from_pydict({"report": pa.array([self.to_bytes()], pa.binary())})


@collector_paused()
def read_slot_reports(reports: pa.Table) -> tuple[SlotReport, ...]:
    """The reports in a table that the driver collected; only its own tasks write them.

    Args:
        reports: rows of `SLOT_REPORT_SCHEMA`.
    """
    pickled: Iterable[bytes] = reports.column("report").cast(pa.binary()).to_pylist()
    return tuple(map(SlotReport.from_bytes, pickled))
