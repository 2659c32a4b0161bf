"""The driver's instructions to the tasks of a superstep, the columns of their rows, and their reports.

Rows are shuffled and converted to Arrow, so routing copies no value: a key, time or id that is a column of the input is
read from that column.
"""

from __future__ import annotations

import hashlib
import pickle
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.inputs.payload import Payload
from millpond.executor.interval.bundle import DeadLetter, IntervalPlan
from millpond.executor.interval.row_update import Manifest
from millpond.executor.pipeline.nodes import WeakStreams
from millpond.executor.superstep.delivery import ProductionSource
from millpond.executor.time.instants import DEFAULT_READING, TimeReading
from millpond.executor.time.observations import InputObservation, Watch
from millpond.statestore.app_ids import RESTORED_APP_ID
from millpond.statestore.errors import MillpondError
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.system import collector_paused
from millpond.statestore.types import Durability, EventTimeMicros, Superstep, WallTimeMicros, quickly_pickled

if TYPE_CHECKING:
    from millpond.executor.pipeline.nodes import ComputationNode
    from millpond.statestore.store import Store


TARGET: Final = "__millpond_target"
"""
A row's destination: the position of the interval that owns its key. A record without a readable key or time has the
`unreadable_target` of its consumer's first interval.
"""

KEY: Final = "__millpond_key"
AT: Final = "__millpond_at"
ID: Final = "__millpond_id"
ERROR: Final = "__millpond_error"

PRODUCTIONS: Final = "__millpond_productions"
"""Productions for a slot, as one Arrow stream, with any target of the slot. Null in a row of the outside input."""

POSITION_SQL: Final = f"CASE WHEN {TARGET} < 0 THEN -1 - {TARGET} ELSE {TARGET} END"
"""`position_of` of the column `TARGET`, in Spark SQL."""

READABLE_SQL: Final = f"{TARGET} >= 0"
"""`is_readable` of the column `TARGET`, in Spark SQL."""


def unreadable_target(position: int) -> int:
    """Return the target of an unreadable record, which the interval at ``position`` reports as a dead letter."""
    return -1 - position


def is_readable(target: int) -> bool:
    return target >= 0


def position_of(target: int) -> int:
    return target if is_readable(target) else -1 - target


def slots_of_rows(targets: npt.NDArray[np.int32], slots: int) -> npt.NDArray[np.int32]:
    """Return the slot of each target."""
    slot_of_row: npt.NDArray[np.int32] = np.where(targets < 0, -1 - targets, targets) % slots
    return slot_of_row


def readable_rows(targets: Any) -> Any:
    """`is_readable` of each element of an Arrow array, as an Arrow array."""
    return pc.greater_equal(targets, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedColumns:
    """The columns of a routed row: the input's own ones, which make up a record's value, and its parts.

    Attributes:
        at: a timestamp, or a number of microseconds.
        error: the reason why a record is unreadable; ``None`` if only a null key or time makes it so.
        sign: insertion or retraction; ``None`` if the rows are no changes.
        raw_at: the source of an unreadable time. ``None`` if ``error`` has the reason, or a task stamps the records.
        key_parts: the sources of null typed keys, by the position of their consumer's first interval.
    """

    key: str
    at: str
    id: str | None
    error: str | None
    own: tuple[str, ...]
    raw_at: str | None = None
    sign: str | None = None
    key_parts: Mapping[int, str | tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A consumer's intervals in key order: positions in the plan, and low bounds, the first of them ``""``.

    ``key`` extracts the keys of an outside input. ``None`` keeps the injector's key.
    """

    positions: tuple[int, ...]
    lows: tuple[str, ...]
    key: KeyExtractor = None

    @property
    def first(self) -> int:
        """The position of the interval whose task reports unreadable records."""
        return self.positions[0]


_BOUNDS_MAX: Final = 16
"""Bounds that are compared with each key. With more of them it takes less time to sort the keys."""


def targets_of(keys: pa.Array, route: Route) -> npt.NDArray[np.int32]:
    """Return the target of each key; a null key has the unreadable one."""
    is_key = keys.is_valid().to_numpy(zero_copy_only=False)
    unreadable, positions = unreadable_target(route.first), np.asarray(route.positions, np.int32)
    if len(positions) <= _BOUNDS_MAX:
        places = np.zeros(len(keys), np.intp)
        for low in route.lows[1:]:
            places += pc.greater_equal(keys, low).fill_null(False).to_numpy(zero_copy_only=False)
        return np.where(is_key, positions[places], np.int32(unreadable))
    targets = np.full(len(keys), unreadable, np.int32)
    order = pc.sort_indices(keys).to_numpy()[: len(keys) - keys.null_count]
    rows = range(len(order))
    cuts = [bisect_left(rows, low, key=lambda row: keys[order[row]].as_py()) for low in route.lows[1:]]
    starts = [0, *cuts, len(order)]
    for position, (start, end) in zip(route.positions, pairwise(starts), strict=True):
        targets[order[start:end]] = position
    return targets


SlotParts: TypeAlias = Mapping[int, IntervalPlan]
"""The part of a slot in a superstep, by position. The position modulo the number of slots is the slot."""

SETTLING_MS: Final = 50
"""Time to give a slot a home, long enough that no executor or process gets two before each has one."""

_CODEC: Final = "zstd"
# Arrow needs the decompressed length, so it precedes the compressed bytes.
_LENGTH_BYTES: Final = 8

_EPOCH: Final = EventTimeMicros(0)

SLOT_REPORT_SCHEMA: Final = "report binary"
"""One pickled `SlotReport` a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInput:
    """The outside input whose records the partitions contain.

    Attributes:
        first_targets: positions of the first consumer's intervals, so that each record is counted once.
        id_scopes: prefix of record ids, by consumer.
        injector: the pickled injector, if its watermark depends on more than times.
        payload: decodes the records' values. ``None``: the rows are the values.
        max_record_bytes: size above which a record becomes a dead letter; ``None``: any size is accepted.
        digested: the columns of a bounded frame, whose digest is recorded; empty for other inputs.
        untimed_at: the time of readable records whose own is null. No consumer finds it late.
    """

    stream: str
    columns: RoutedColumns
    first_targets: frozenset[int]
    id_scopes: Mapping[str, bytes]
    watch: Watch
    injector: bytes | None = None
    payload: Payload | None = None
    times: TimeReading = DEFAULT_READING
    max_record_bytes: int | None = None
    digested: tuple[str, ...] = ()
    untimed_at: EventTimeMicros = _EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetting:
    """The store and pipeline code of a worker process.

    Attributes:
        code_digest: a hash of ``code``. A worker process with the same digest does not unpickle it again.
        cache_bytes: soft-state budget of a worker process, in bytes.
        restored_at: the version of the last repair or rewind. Soft state from before it is invalid.
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
        cls, store: Store, computations: Mapping[str, ComputationNode], cache_bytes: int, disk: DiskOptions
    ) -> Self:
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
        kept = str(self.cache_bytes), str(self.disk), str(self.restored_at)
        return self.url, self.durability, self.code_digest, *kept


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    """The instructions for all tasks of one superstep.

    Attributes:
        parts: the packed `SlotParts` of each slot with work, so that a task unpacks only its own.
        sources: committed files with undelivered productions.
        weak: the productions that are delivered before the commit, by computation.
        handed_on: uncommitted files of this superstep, with weak productions.
        secret: known to the run's processes alone. ``None``: each task runs where Spark starts it.
        slots_max: number of slots that a process can be home to.
        is_one_machine: the driver can reach the homes of slots.
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
    secret: str | None = None
    slots_max: int = 1
    is_one_machine: bool = False

    @property
    def home_secret(self) -> str | None:
        """The secret of homes with this plan's store and code: a seeded generator may give two runs one secret."""
        return None if self.secret is None else "\0".join((self.secret, *self.setting.name))

    def parts_of(self, slot: int) -> SlotParts:
        packed = self.parts.get(slot)
        if packed is None:
            return {}
        length, compressed = int.from_bytes(packed[:_LENGTH_BYTES]), packed[_LENGTH_BYTES:]
        pickled = pa.decompress(compressed, length, _CODEC, asbytes=True)
        parts: SlotParts = pickle.loads(pickled)  # noqa: S301 - written by the driver of this run
        return parts

    def to_neighbour(self, slot: int) -> bytes:
        """Return a slot and its plan for another process, which has the code already."""
        mine = {slot: self.parts[slot]} if slot in self.parts else {}
        return pickle.dumps((slot, replace(self, setting=replace(self.setting, code=b""), parts=mine)))


@collector_paused()
def pack_parts(parts: SlotParts, slots: int) -> dict[int, bytes]:
    """Pack the parts by slot, compressed because every executor gets all of them."""
    by_slot: dict[int, dict[int, IntervalPlan]] = {}
    for position, part in parts.items():
        by_slot.setdefault(position % slots, {})[position] = part
    packed = {}
    for slot, mine in by_slot.items():
        pickled = pickle.dumps(mine)
        packed[slot] = len(pickled).to_bytes(_LENGTH_BYTES) + pa.compress(pickled, _CODEC, asbytes=True)
    return packed


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotReport:
    """The answer of one task to the driver.

    Attributes:
        failure: the error that ended the task, if another attempt would fail in the same way.
        process: the process that ran the slot. The driver counts slots that stay in their process.
        read_bytes: bytes of row files read by the slot.
        arrived_rows, arrived_bytes: of the outside input, in Arrow.
        digest: of the slot's rows of a bounded frame.
    """

    slot: int
    manifests: tuple[Manifest, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    inputs: tuple[InputObservation, ...] = ()
    failure: MillpondError | None = None
    process: str = ""
    read_bytes: int = 0
    arrived_rows: int = 0
    arrived_bytes: int = 0
    digest: int = 0


@collector_paused()
def read_slot_reports(reports: pa.Table) -> tuple[SlotReport, ...]:
    pickled: Iterable[bytes] = reports.column("report").cast(pa.binary()).to_pylist()
    return tuple(pickle.loads(report) for report in pickled)  # noqa: S301 - written by the driver's own tasks
