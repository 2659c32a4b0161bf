"""The local runner: a pipeline in this process, without a JVM in the data path (architecture §5).

Use it for tests and development, for services that need ten milliseconds instead of three hundred, and for the
simulation. For a cluster use `SparkRunner`, on the same store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Final

from millpond.executor.inputs.extraction import RowsLike
from millpond.executor.local.bounded import consume_inputs, observe_rows
from millpond.executor.local.engine import LocalEngine
from millpond.executor.local.run import LocalRun
from millpond.executor.local.worker import LocalWorker
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import CHECKPOINT_AFTER, RunnerOptions
from millpond.executor.run.run import RunSummary
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.durations import accepts_old_durations
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Durability, Rng

_WRITERS: Final = 2
_DEAD_LETTER_LIMIT: Final = DeadLetterLimit()
_UPKEEP: Final = UpkeepPolicy(compaction=CompactionPolicy(fan_in=32, files_max=128))
"""Wider compactions for a hundred small commits a second; otherwise they take a third of the process (docs/design/003-compaction.md)."""


class LocalRunner:
    """Runs pipelines in this process; all state is in the store, so any process may continue a pipeline.

    Args:
        store: path of the store, created if it does not exist, or an open `Store`, which stays open.
        zookeeper: ``host:port,…`` of an ensemble; ``None`` runs one server next to the store.
        zookeeper_security: TLS and credentials for the ensemble; by default from the environment.
        storage_options: credentials and endpoints of an object store; see `Store.open`.
        durability: what commits to a local folder survive: ``"disk"`` a power cut; ``"os_cache"``, the default,
            the end of a process, but **no power cut**. See `Store.open`.
        intervals: number of key intervals into which a computation is divided at its first input, unless
            it declares a number.
        cache_mib: soft-state budget of a process, for all its intervals, in MiB.
        disk_mib: disk budget of the machine for row files of an object store, for all processes, in MiB; 0 for none.
            ``None`` takes 8 GiB, or a tenth of the free space, and nothing for a store in a local folder.
        disk_folder: folder for these files; ``None`` takes ``millpond-UID`` in the system's temporary folder. No
            other user may write to it.
        intake_records_max: injected records that may wait before `LocalRun.inject` waits.
        pause_timeout: longest wait for ZooKeeper or the object store to come back.
        on_held: reaction to another process that holds the pipeline: ``take`` it over (the next commit
            of the other process fails), ``wait`` as a standby, or ``refuse``.
        accept_ended: accept records of a stream whose input an earlier run has ended, as late records.
        checkpoint_weak_after: longest wait of a weak production for its consumer before it is
            checkpointed, so that the sender of its cause is acknowledged (MillWheel §6.1.3).
        upkeep: when the store is compacted and its garbage collected; ``None`` leaves that to
            ``millpond gc``.
        balance: when key intervals are split and merged by their load; ``None`` leaves that to
            ``millpond intervals``. In one thread more intervals make nothing faster.
        progress: show a progress line in a terminal and log supersteps.
        dead_letter_limit: share of records that may become dead letters before the run stops; ``None``
            accepts all, as ``on_error="dead_letter"`` alone would.
        clock: source of time.
        rng: source of file names.

    Raises:
        InvalidError: an option is out of its range.

    Example::

        runner = LocalRunner("pond")
        runner.run(pipeline, {"queries": rows})     # to the end of the input
        runner.run(pipeline, {"queries": rows}, finish=False)   # more will follow
        with runner.start(pipeline) as run:         # until stopped
            run.inject("queries", {"query": "cat", "time": 5}).wait()
    """

    @accepts_old_durations
    def __init__(
        self,
        store: Store | str | Path,
        *,
        zookeeper: str | None = None,
        zookeeper_security: ZooKeeperSecurity | None = None,
        storage_options: Mapping[str, str] | None = None,
        durability: Durability | None = None,
        intervals: int = 1,
        cache_mib: int = 512,
        disk_mib: int | None = None,
        disk_folder: str | Path | None = None,
        intake_records_max: int = 100_000,
        pause_timeout: str | timedelta = "5m",
        on_held: OnHeld = "take",
        accept_ended: bool = False,
        checkpoint_weak_after: str | timedelta = CHECKPOINT_AFTER,
        upkeep: UpkeepPolicy | None = _UPKEEP,
        balance: BalancePolicy | None = None,
        progress: bool = True,
        dead_letter_limit: DeadLetterLimit | None = _DEAD_LETTER_LIMIT,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        if upkeep is not None and upkeep.place == "spark":
            raise InvalidError(
                "there is no Spark in the local runner: compactions go to a process or a thread"
            )
        self._options = RunnerOptions(
            store=store,
            zookeeper=zookeeper,
            zookeeper_security=zookeeper_security,
            storage_options=storage_options,
            durability=durability,
            intervals=intervals,
            cache_mib=cache_mib,
            disk_mib=disk_mib,
            disk_folder=disk_folder,
            intake_records_max=intake_records_max,
            checkpoint_weak_after=checkpoint_weak_after,
            pause_timeout=pause_timeout,
            on_held=on_held,
            accept_ended=accept_ended,
            upkeep=upkeep,
            balance=balance,
            progress=progress,
            dead_letter_limit=dead_letter_limit,
            clock=clock or SystemClock(),
            rng=rng or SystemRng(),
        )

    def run(
        self, pipeline: EnginePipeline, inputs: Mapping[str, RowsLike], *, finish: bool = True
    ) -> RunSummary:
        """Consume the inputs to their end, then fire every timer in event time.

        No record is late, whatever the order of the rows: the low watermark of an input is the least
        time of its remaining rows. So windows of nearly sorted input close on the way, and other windows
        at the end. To resume a run that was killed, run it again with the same inputs: rows that the
        store has consumed are skipped. Rows of a later run are refused, because windows are closed.

        With ``finish=False`` more rows will follow: the run does all the work that its rows have made due,
        and leaves the watermarks to their policies. Give a later run the same rows with the new rows
        behind them; consumed rows are skipped. The rows of one run count as having arrived together, so
        no row makes another row of that run late.

        Args:
            pipeline: the pipeline.
            inputs: rows per injected stream: a table, an iterable of mappings, or a `RowSource`, of which only
                a piece is in memory.
            finish: the inputs end with these rows.

        Returns:
            Counts, the streams that have ended, and the reason for skipped rows by stream.

        Raises:
            InvalidError: pipeline or inputs do not fit, the store has consumed other inputs, there are new
                rows although an earlier run has ended the input, or more records became dead letters than
                ``dead_letter_limit`` allows.
            FencedError: another process has taken over.
            DataError: bytes of the store are missing or wrong.
        """
        run = self._open(pipeline.check(inputs=inputs), writers=_WRITERS, has_thread=False, is_bounded=True)
        try:
            given = run.read_inputs(inputs)
            run.begin_backfills(given)
            run.finish_backfills()
            consume_inputs(run, given, finish=finish)
            for stream, rows in given.items():
                if finish:
                    run.finish(stream)
                else:
                    observe_rows(run, stream, rows)
            run.run_until_quiet()
            run.note_nothing()
            if finish:
                run.note_end()
        except BaseException:
            run.abandon()
            raise
        return run.stop()

    def start(self, pipeline: EnginePipeline, *, stepping: bool = False) -> LocalRun:
        """Start a run that takes records by `LocalRun.inject` until it is stopped.

        Args:
            pipeline: the pipeline.
            stepping: start no thread; supersteps run only in `LocalRun.step` and `run_until_quiet`.

        Raises:
            InvalidError: the pipeline cannot run.
            ConflictError: another process holds it and ``on_held`` is ``refuse``.
            UnavailableError: ZooKeeper or the object store cannot be reached.
        """
        return self._open(
            pipeline.check(), writers=0 if stepping else _WRITERS, has_thread=not stepping, is_bounded=False
        )

    def _open(self, topology: Topology, *, writers: int, has_thread: bool, is_bounded: bool) -> LocalRun:
        def start(store: Store, release: Callable[[], None]) -> LocalRun:
            worker = self._open_worker(topology, store, writers=writers)
            run = LocalRun(worker, self._options.clock, release)
            if not is_bounded:
                try:
                    run.begin_backfills()
                except BaseException:
                    run.abandon()
                    raise
            if has_thread:
                worker.start()
            return run

        return self._options.open_run(start)

    def _open_worker(self, topology: Topology, store: Store, *, writers: int) -> LocalWorker:
        upkeep = self._options.upkeep
        options = replace(
            self._options, upkeep=None if upkeep is None else replace(upkeep, background=bool(writers))
        )
        coordinator = options.open_coordinator(store, topology, threads=bool(writers))
        return LocalWorker(LocalEngine(coordinator, options, writers=writers), coordinator, options)
