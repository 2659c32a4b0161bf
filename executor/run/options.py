"""The options that both runners have, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar, get_args

from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.ownership.evolution import as_stored
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.progress import Progress
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import DURABILITIES, Clock, Durability, Rng

_Run = TypeVar("_Run")

_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """Where a runner finds its store, and how it runs a pipeline on it.

    Attributes:
        store: path of the store, created if it does not exist, or an open `Store`, which stays open.
        zookeeper: ``host:port,…`` of an ensemble; ``None`` runs one server next to the store.
        zookeeper_security: TLS and credentials for the ensemble; by default what the environment says.
        storage_options: credentials and endpoints of an object store.
        durability: what commits to a local folder survive; see `Store.open`.
        intervals: key intervals of a computation, unless it has its own number; ``None`` leaves
            that to the runner.
        cache_mib: soft-state budget of a process, for all its intervals, in MiB.
        disk_mib: budget of a machine's disk for row files of an object store, in MiB; 0 for none, ``None`` for the
            default of `DiskOptions`.
        disk_folder: where on the disk; ``None`` for the default of `DiskOptions`.
        pause_timeout_ms: how long to wait for ZooKeeper or the object store to come back.
        on_held: what to do if another process holds the pipeline: ``take``, ``wait`` or ``refuse``.
        accept_ended: take records of a stream that an earlier run has ended, as late ones.
        upkeep: how the store is kept small while the pipeline runs; ``None`` for not at all.
        balance: when intervals are split and merged by their load; ``None``: only by hand.
        progress: whether to show a progress line and log supersteps.
        dead_letter_limit: how much may become dead letters before the run stops; ``None``: all of it.
        clock: the source of time.
        rng: the source of file names.

    Raises:
        InvalidError: an option is out of its range.
    """

    store: Store | str | Path
    zookeeper: str | None = None
    zookeeper_security: ZooKeeperSecurity | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    durability: Durability | None = None
    intervals: int | None = None
    cache_mib: int = 512
    disk_mib: int | None = None
    disk_folder: str | Path | None = None
    pause_timeout_ms: float = 300_000
    on_held: OnHeld = "take"
    accept_ended: bool = False
    upkeep: UpkeepPolicy | None = None
    balance: BalancePolicy | None = None
    progress: bool = True
    dead_letter_limit: DeadLetterLimit | None = field(default_factory=DeadLetterLimit)
    clock: Clock = field(default_factory=SystemClock)
    rng: Rng = field(default_factory=SystemRng)

    def __post_init__(self) -> None:
        """Refuse options with which no pipeline can run."""
        if self.intervals is not None:
            check_at_least("intervals", self.intervals, 1)
        check_at_least("cache_mib", self.cache_mib, 0)
        if self.disk_mib is not None:
            check_at_least("disk_mib", self.disk_mib, 0)
        if self.disk_folder is not None and not Path(self.disk_folder).is_absolute():
            raise InvalidError(
                "disk_folder is an absolute path: each machine has its own working folder",
                disk_folder=self.disk_folder,
            )
        check_at_least("pause_timeout_ms", self.pause_timeout_ms, 0)
        if not isinstance(self.dead_letter_limit, DeadLetterLimit | None):
            raise InvalidError(
                "dead_letter_limit is a DeadLetterLimit or None", type=type(self.dead_letter_limit).__name__
            )
        if self.on_held not in get_args(OnHeld):
            raise InvalidError("on_held is take, wait or refuse", on_held=self.on_held)
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
        """Soft-state budget of one interval, in bytes."""
        return self.cache_mib * _MIB

    @property
    def disk(self) -> DiskOptions:
        """Whether row files are kept on the machine's disk."""
        return DiskOptions(
            budget_bytes=None if self.disk_mib is None else self.disk_mib * _MIB,
            folder=None if self.disk_folder is None else str(self.disk_folder),
        )

    def open_run(self, start: Callable[[Store, Callable[[], None]], _Run]) -> _Run:
        """Open the store and start a run on it.

        Args:
            start: starts the run; it gets the store, and the function that the run calls once at its
                end. If it raises, the store is closed again.

        Raises:
            UnavailableError: ZooKeeper or the object store cannot be reached.
        """
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
        intervals: int,
        upkeep: UpkeepPolicy | None,
        accept_checkpoint: bool = False,
        compaction_workers: CompactionWorkers | None = None,
        threads: bool = True,
    ) -> Coordinator:
        """Take the leases of a pipeline and recover its state; see `Coordinator` for the arguments.

        Raises:
            InvalidError: the store knows the pipeline by another name, or its code does not fit the rows.
            ConflictError: another process holds an interval and ``on_held`` is ``refuse``.
            UnavailableError: ZooKeeper or the object store cannot be reached.
            DataError: a file is missing or its bytes are wrong.
        """
        coordinator = Coordinator(
            store,
            as_stored(topology, store.committer.refresh()),
            clock=self.clock,
            rng=self.rng,
            intervals=intervals,
            accept_checkpoint=accept_checkpoint,
            accept_ended=self.accept_ended,
            pause_timeout_ms=self.pause_timeout_ms,
            on_held=self.on_held,
            upkeep=upkeep,
            balance=self.balance,
            compaction_workers=compaction_workers,
            threads=threads,
            dead_letter_limit=self.dead_letter_limit,
        )
        coordinator.open()
        return coordinator

    def progress_of(self, pipeline: str, *, log_every_ms: float = 0) -> Progress:
        """What reports the supersteps of a pipeline.

        Args:
            pipeline: its name.
            log_every_ms: log at most this often and sum the supersteps in between; 0 logs each.
        """
        return Progress(pipeline, clock=self.clock, enabled=self.progress, log_every_ms=log_every_ms)


def check_at_least(name: str, value: float, least: float) -> None:
    """Refuse an option that is too small.

    Raises:
        InvalidError: names the option.
    """
    if value < least:
        raise InvalidError(f"{name} is at least {least}", value=value)


def _keep_open() -> None:
    """Release nothing: the caller closes the store."""
