"""The options of both runners: declared and checked once, and handed down whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict, TypeVar

from millpond.executor.maintenance.policy import CompactionWorkers, UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.ownership.evolution import as_stored
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.progress import Progress
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.executor.superstep.options import PipelineOptions
from millpond.statestore.arguments import check_count, check_instance
from millpond.statestore.durations import duration_ms, with_new_names
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.history.lineage import check_folder, local_folder, place_of
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.objects.obstore import refuse_passwords
from millpond.statestore.store import Store
from millpond.statestore.types import DURABILITIES, Clock, Durability, Objects, Rng

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_Run = TypeVar("_Run")

_MIB: Final = 1 << 20

CHECKPOINTS_FOLDER: Final = "checkpoints"
"""The folder of a store with the checkpoints of streaming queries."""


class SharedRunnerOptions(TypedDict, total=False):
    """The options that both runners have; each is a keyword of `LocalRunner` and `SparkRunner`."""

    zookeeper: str | None
    """``host:port,…`` of an ensemble; ``None``, the default, runs one server next to the store."""

    zookeeper_security: ZooKeeperSecurity | None
    """TLS and credentials for the ensemble; by default from the environment."""

    storage_options: Mapping[str, str] | None
    """Credentials and endpoints of an object store; see `Store.open`."""

    durability: Durability | None
    """What commits to a local folder survive: ``"disk"`` a power cut; ``"os_cache"``, the default, the end of a
    process, but **no power cut**. See `Store.open`.
    """

    intervals: int | None
    """The number of key intervals into which a computation is divided at its first input, unless it declares a
    number; by default 1 in the local runner, and Spark's default parallelism on Spark.
    """

    cache_mib: int
    """The soft-state budget of a process (on Spark, of a worker process), for all its intervals, in MiB; 512 by
    default.
    """

    disk_mib: int | None
    """The disk budget of each machine for row files of an object store, for all its processes, in MiB; 0 for none.
    ``None``, the default, takes 8 GiB, or a tenth of the free space, and nothing for a store in a local folder.
    """

    disk_folder: str | Path | None
    """The folder for these files on each machine; ``None`` takes ``millpond-UID`` in its temporary folder. No other
    user may write to it.
    """

    on_held: OnHeld
    """The reaction to another process that holds the pipeline: ``take``, the default, takes it over (the next commit
    of the other process fails), ``wait`` waits as a standby, ``refuse`` raises.
    """

    pause_timeout: str | timedelta
    """The longest wait for ZooKeeper or the object store to come back; ``"5m"`` by default."""

    accept_ended: bool
    """Accept records of a stream whose input an earlier run has ended, as late records."""

    upkeep: UpkeepPolicy | None
    """When the store is compacted and its garbage collected; ``None`` leaves that to ``millpond gc``."""

    balance: BalancePolicy | None
    """When key intervals are split and merged by their load; ``None`` leaves that to ``millpond intervals``. On by
    default on Spark only: in one thread more intervals make nothing faster.
    """

    progress: bool | Literal["json"]
    """``True``, the default, shows a progress line in a terminal or a notebook, and writes log lines as JSON to standard
    error where that is a pipe or a file. ``"json"`` writes them on a terminal, too; ``False`` shows nothing. A program that
    has set up logging gets the log lines there.
    """

    dead_letter_limit: DeadLetterLimit | None
    """The share of records that may become dead letters before the run stops; ``None`` accepts all, as
    ``on_error="dead_letter"`` alone would.
    """

    clock: Clock | None
    """The source of time."""

    rng: Rng | None
    """The source of file names."""


class LocalRunnerOptions(SharedRunnerOptions, total=False):
    """The options of `LocalRunner`: `SharedRunnerOptions` and two more."""

    intake_records_max: int
    """The number of injected records that may wait before `LocalRun.inject` waits; 100,000 by default."""

    checkpoint_weak_after: str | timedelta
    """The longest wait of a weak production for its consumer before it is checkpointed, so that the sender of its
    cause is acknowledged (MillWheel §6.1.3); ``"1s"`` by default.
    """


class SparkRunnerOptions(SharedRunnerOptions, total=False):
    """The options of `SparkRunner`: `SharedRunnerOptions` and four more."""

    spark: SparkSession | None
    """The session; ``None``, the default, takes the active session or creates one."""

    tick: str | timedelta
    """The silence of the input after which due work runs without it; ``"250ms"`` by default."""

    accept_checkpoint: bool
    """Continue with a streaming checkpoint that is unknown to this store."""

    checkpoint_location: str | Path | None
    """The folder with the checkpoints of the streaming queries, one for each input: a path or URL that Spark's driver can
    write. ``None``, the default, takes ``checkpoints`` in the store's folder. To move them, stop the pipeline and copy
    the folder.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions(PipelineOptions):
    """The options of a runner with their defaults; `SharedRunnerOptions` and its heirs explain each."""

    store: Store | str | Path
    zookeeper: str | None = None
    zookeeper_security: ZooKeeperSecurity | None = None
    storage_options: Mapping[str, str] | None = field(default=None, repr=False)
    durability: Durability | None = None
    cache_mib: int = 512
    disk_mib: int | None = None
    disk_folder: str | Path | None = None
    progress: bool | Literal["json"] = True
    intake_records_max: int = 100_000
    checkpoint_weak_after: str | timedelta = "1s"
    spark: SparkSession | None = None
    tick: str | timedelta = "250ms"
    checkpoint_location: str | Path | None = None

    @classmethod
    def given(
        cls, store: Store | str | Path, options: Mapping[str, Any], known: Collection[str], **defaults: Any
    ) -> Self:
        """Return a runner's options out of its keywords, of which ``known`` are all that it has."""
        options = with_new_names(options)
        for option in sorted(options.keys() - known):
            raise InvalidError(
                f"no such option{did_you_mean(option, known)}", option=option, options=sorted(known)
            )
        # Without a clock or randomness the system's serve.
        seams = {name for name in ("clock", "rng") if options.get(name) is None}
        chosen = {name: options[name] for name in options.keys() - seams}
        return cls(store=store, has_own_intervals=options.get("intervals") is not None, **defaults | chosen)

    def __post_init__(self) -> None:
        # Not super(): the decorator replaces a class with slots, so its methods close over another class.
        PipelineOptions.__post_init__(self)
        check_count("cache_mib", self.cache_mib, least=0)
        check_count("intake_records_max", self.intake_records_max)
        check_instance("storage_options", self.storage_options, Mapping, optional=True)
        check_instance("zookeeper_security", self.zookeeper_security, ZooKeeperSecurity, optional=True)
        duration_ms("tick", self.tick)
        # A negative one checkpoints at once.
        duration_ms("checkpoint_weak_after", self.checkpoint_weak_after, least=None)
        if self.disk_mib is not None:
            check_count("disk_mib", self.disk_mib, least=0)
        if self.disk_folder is not None and not Path(self.disk_folder).is_absolute():
            raise InvalidError(
                "disk_folder is an absolute path: each machine has its own working folder",
                disk_folder=self.disk_folder,
            )
        if self.progress not in (True, False, "json"):
            raise InvalidError('progress must be True, False or "json"', progress=self.progress)
        if self.durability not in (None, *DURABILITIES):
            raise InvalidError("durability is disk or os_cache", durability=self.durability)
        if isinstance(self.store, Store) and self.durability not in (None, self.store.durability):
            raise InvalidError(
                "the store is open with another durability: pass it to Store.open",
                durability=self.durability,
                store=self.store.durability,
            )

        _check_place_of_checkpoints(self.checkpoint_location, self.place)

    @property
    def place(self) -> str:
        """The store's location."""
        return self.store.path if isinstance(self.store, Store) else place_of(self.store)

    @property
    def checkpoints(self) -> str:
        """The folder with the checkpoints of the streaming queries."""
        given = self.checkpoint_location
        return f"{self.place}/{CHECKPOINTS_FOLDER}" if given is None else place_of(given)

    @property
    def cache_bytes(self) -> int:
        return self.cache_mib * _MIB

    @property
    def disk(self) -> DiskOptions:
        return DiskOptions(
            budget_bytes=None if self.disk_mib is None else self.disk_mib * _MIB,
            folder=None if self.disk_folder is None else str(self.disk_folder),
        )

    def open_run(self, start: Callable[[Store, Callable[[], None]], _Run]) -> _Run:
        """Open the store and start a run on it; ``start`` gets the store, and a function to call once at the run's end."""
        if isinstance(self.store, Store):
            # The store belongs to the caller, who closes it.
            return start(self.store, lambda: None)
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
        row_files: Objects | None = None,
    ) -> Coordinator:
        """Take the leases of a pipeline and recover its state.

        With ``threads`` sinks are written in parallel with the next superstep. ``row_files`` is where row files are read, by
        default the store.
        """
        coordinator = Coordinator(
            store,
            as_stored(topology, store.committer.refresh()),
            self,
            threads=threads,
            compaction_workers=compaction_workers,
            row_files=row_files,
        )
        coordinator.open(is_current=True)
        return coordinator

    def progress_of(self, pipeline: str, *, log_every_ms: float = 0) -> Progress:
        """Return the reporter of a pipeline's supersteps; it logs at most once in ``log_every_ms``, or every superstep."""
        return Progress(pipeline, clock=self.clock, enabled=self.progress, log_every_ms=log_every_ms)


def _check_place_of_checkpoints(given: str | Path | None, store: str) -> None:
    if given is None:
        return
    if not isinstance(given, str | Path) or not str(given).strip():
        raise InvalidError("checkpoint_location must be a path or a URL", checkpoint_location=given)
    local, place = local_folder(given), place_of(given)
    if local is not None:
        check_folder(local, given, "checkpoints")
    refuse_passwords(place, {})
    own = f"{store}/{CHECKPOINTS_FOLDER}"
    if place == store or (place.startswith(f"{store}/") and place != own and not place.startswith(f"{own}/")):
        raise InvalidError(
            f"checkpoint_location must not lie among the store's own files: take {CHECKPOINTS_FOLDER} in its folder, or "
            "a folder elsewhere",
            checkpoint_location=place,
            store=store,
        )
