"""The options of both runners: declared and checked once, and handed down whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from millpond.executor.maintenance.policy import CompactionWorkers
from millpond.executor.ownership.evolution import as_stored
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.progress import Progress
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.options import PipelineOptions, check_at_least
from millpond.statestore.durations import duration_ms
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.store import Store
from millpond.statestore.types import DURABILITIES, Durability

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Run = TypeVar("_Run")

_MIB: Final = 1 << 20

CHECKPOINT_AFTER: Final = "1s"
"""A weak production that its consumer has not processed by then is checkpointed (MillWheel §6.1.3)."""

TICK: Final = "250ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions(PipelineOptions):
    """The options of a runner: the pipeline's, and the location of the store; `LocalRunner` and `SparkRunner` explain each."""

    store: Store | str | Path
    zookeeper: str | None = None
    zookeeper_security: ZooKeeperSecurity | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    durability: Durability | None = None
    cache_mib: int = 512
    disk_mib: int | None = None
    disk_folder: str | Path | None = None
    progress: bool = True
    intake_records_max: int = 100_000
    checkpoint_weak_after: str | timedelta = CHECKPOINT_AFTER
    spark: SparkSession | None = None
    tick: str | timedelta = TICK

    def __post_init__(self) -> None:
        """Refuse options with which no pipeline can run."""
        # Not super(): the decorator replaces a class with slots, so its methods close over another class.
        PipelineOptions.__post_init__(self)
        check_at_least("cache_mib", self.cache_mib, 0)
        check_at_least("intake_records_max", self.intake_records_max, 1)
        duration_ms("tick", self.tick)
        # A negative one checkpoints at once.
        duration_ms("checkpoint_weak_after", self.checkpoint_weak_after, least=None)
        if self.disk_mib is not None:
            check_at_least("disk_mib", self.disk_mib, 0)
        if self.disk_folder is not None and not Path(self.disk_folder).is_absolute():
            raise InvalidError(
                "disk_folder is an absolute path: each machine has its own working folder",
                disk_folder=self.disk_folder,
            )
        if self.durability not in (None, *DURABILITIES):
            raise InvalidError("durability is disk or os_cache", durability=self.durability)
        if isinstance(self.store, Store) and self.durability not in (None, self.store.durability):
            raise InvalidError(
                "the store is open with another durability: pass it to Store.open",
                durability=self.durability,
                store=self.store.durability,
            )

    @property
    def cache_bytes(self) -> int:
        """Soft-state budget of a process, in bytes."""
        return self.cache_mib * _MIB

    @property
    def disk(self) -> DiskOptions:
        """The budget and folder for row files on the machine's disk."""
        return DiskOptions(
            budget_bytes=None if self.disk_mib is None else self.disk_mib * _MIB,
            folder=None if self.disk_folder is None else str(self.disk_folder),
        )

    def open_run(self, start: Callable[[Store, Callable[[], None]], _Run]) -> _Run:
        """Open the store and start a run on it; ``start`` gets the store, and a function to call once at the run's end."""
        if isinstance(self.store, Store):
            # The store belongs to the caller, who closes it.
            return start(self.store, _keep_open)
        store = Store.open(
            self.store,
            self.zookeeper,
            zookeeper_security=self.zookeeper_security,
            storage_options=self.storage_options,
            durability=self.durability,
            clock=self.clock,
            rng=self.rng,
        )
        try:
            return start(store, store.close)
        except BaseException:
            store.close()
            raise

    def open_coordinator(
        self,
        store: Store,
        topology: Topology,
        *,
        threads: bool = True,
        compaction_workers: CompactionWorkers | None = None,
    ) -> Coordinator:
        """Take the leases of a pipeline and recover its state.

        With ``threads`` sinks are written in parallel with the next superstep.

        Raises:
            InvalidError: the store knows the pipeline by another name, or its code does not fit the rows.
            ConflictError: another process holds an interval and ``on_held`` is ``refuse``.
            UnavailableError: ZooKeeper or the object store cannot be reached.
            DataError: a file is missing or its bytes are wrong.
        """
        coordinator = Coordinator(
            store,
            as_stored(topology, store.committer.refresh()),
            self,
            threads=threads,
            compaction_workers=compaction_workers,
        )
        coordinator.open()
        return coordinator

    def progress_of(self, pipeline: str, *, log_every_ms: float = 0) -> Progress:
        """Return the reporter of a pipeline's supersteps; it logs at most once in ``log_every_ms``, or every superstep."""
        return Progress(pipeline, clock=self.clock, enabled=self.progress, log_every_ms=log_every_ms)


def _keep_open() -> None:
    """Release nothing: the caller closes the store."""
