"""
The local runner: a pipeline in this process, without a JVM in the data path (architecture §5).

It is for tests and development, for services that need ten milliseconds instead of three
hundred, and for the simulation. It is not a cluster; `SparkRunner` is, on the same store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa

from millpond.executor.local.engine import LocalEngine
from millpond.executor.local.rows import RowsLike, pieces, rows_from
from millpond.executor.local.run import LocalRun
from millpond.executor.local.weak_round import CHECKPOINT_AFTER_MS
from millpond.executor.local.worker import BUNDLE_RECORDS_MAX, LocalWorker
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.extract_rows import row_count
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.positions import BOUNDED_SOURCE, LOCAL_SOURCE
from millpond.executor.pipeline.topology import Topology
from millpond.executor.reporting.progress import Progress
from millpond.executor.reporting.summary import RunSummary
from millpond.executor.superstep.coordinator import Coordinator
from millpond.executor.superstep.plan import InputPosition
from millpond.gc.compaction_plan import CompactionPolicy
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng

__all__ = ["LocalRunner"]

_MIB: Final = 1 << 20
_WRITERS: Final = 2
_LOG_EVERY_MS: Final = 1_000.0
_UPKEEP: Final = UpkeepPolicy(compaction=CompactionPolicy(fan_in=32, files_max=128))
"""A hundred small commits a second: wider compactions, or they take a third of the process (docs/design/003-compaction.md)."""


class LocalRunner:
    """
    Runs pipelines in this process; all state is in the store, so any process may go on where one stopped.

    Args:
        store: path of the store, made when it is not there, or an open `Store` (which stays open).
        zookeeper: ``host:port,…`` of a real ensemble; ``None`` runs one server beside the store.
        storage_options: credentials and endpoints of an object store; see `Store.open`.
        intervals: key intervals a computation is cut into at its first input, unless it says so itself.
        cache_mib: soft-state budget of one interval.
        intake_records_max: how many injected records may wait before `LocalRun.inject` waits.
        pause_timeout_ms: how long to wait for ZooKeeper or the object store to come back.
        on_held: what to do when another process holds the pipeline: ``take`` it over (the other
            one's next commit fails), ``wait`` as a standby, or ``refuse``.
        checkpoint_weak_after_ms: how long a weak production may wait for its consumer before it is
            checkpointed, so that whoever sent its cause is acknowledged (MillWheel §6.1.3).
        upkeep: how the store is kept small while the pipeline runs; ``None`` leaves that to
            ``millpond gc``.
        progress: show a progress line in a terminal and log supersteps.
        clock: the source of time.
        rng: the source of file names.

    Example::

        runner = LocalRunner("pond")
        runner.run(pipeline, {"queries": rows})     # to the end of the input
        with runner.start(pipeline) as run:         # until stopped
            run.inject("queries", {"query": "cat", "time": 5}).wait()
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        zookeeper: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        intervals: int = 1,
        cache_mib: int = 256,
        intake_records_max: int = 100_000,
        pause_timeout_ms: float = 300_000,
        on_held: OnHeld = "take",
        checkpoint_weak_after_ms: float = CHECKPOINT_AFTER_MS,
        upkeep: UpkeepPolicy | None = _UPKEEP,
        progress: bool = True,
        clock: Clock | None = None,
        rng: Rng | None = None,
    ) -> None:
        for name, value in (("intervals", intervals), ("intake_records_max", intake_records_max)):
            if value < 1:
                raise InvalidError(f"{name} is at least 1", value=value)
        if upkeep is not None and upkeep.place == "spark":
            raise InvalidError(
                "there is no Spark in the local runner: compactions go to a process or a thread"
            )
        self._store = store
        self._zookeeper = zookeeper
        self._storage_options = storage_options
        self._intervals = intervals
        self._cache_bytes = cache_mib * _MIB
        self._intake_records_max = intake_records_max
        self._pause_timeout_ms = pause_timeout_ms
        self._on_held = on_held
        self._checkpoint_weak_after_ms = checkpoint_weak_after_ms
        self._upkeep = upkeep
        self._progress = progress
        self._clock = clock or SystemClock()
        self._rng = rng or SystemRng()

    def run(self, pipeline: EnginePipeline, inputs: Mapping[str, RowsLike]) -> RunSummary:
        """
        Consume the inputs to their end, then let every timer in event time fire.

        The low watermarks wait for the end, so no record is late whatever their order. A run
        that was killed is resumed by running it again with the same inputs: what the store
        has consumed of them is skipped.

        Args:
            pipeline: what to run.
            inputs: rows per injected stream: a table, or an iterable of mappings.

        Raises:
            InvalidError: pipeline or inputs do not fit, or the store has consumed other ones.
            FencedError: another process has taken over.
            DataError: bytes of the store are missing or wrong.
        """
        run = self._open(pipeline.check(inputs=inputs), writers=_WRITERS, has_thread=False)
        try:
            for stream, rows in inputs.items():
                _consume(run, stream, rows)
            for stream in inputs:
                run.finish(stream)
            run.run_until_quiet()
        except BaseException:
            run.abandon()
            raise
        return run.stop()

    def start(self, pipeline: EnginePipeline, *, stepping: bool = False) -> LocalRun:
        """
        Run until stopped; records come by `LocalRun.inject`.

        Args:
            pipeline: what to run.
            stepping: no thread works; nothing happens but in `LocalRun.step` and `run_until_quiet`.

        Raises:
            InvalidError: the pipeline cannot run.
            ConflictError: another process holds it and ``on_held`` is ``refuse``.
            UnavailableError: ZooKeeper or the object store is away.
        """
        return self._open(pipeline.check(), writers=0 if stepping else _WRITERS, has_thread=not stepping)

    def _open(self, topology: Topology, *, writers: int, has_thread: bool) -> LocalRun:
        if isinstance(self._store, Store):
            store, release = self._store, _nothing
        else:
            store = Store.open(
                self._store,
                self._zookeeper,
                storage_options=self._storage_options,
                clock=self._clock,
                rng=self._rng,
            )
            release = store.close
        try:
            worker = self._open_worker(topology, store, writers=writers)
            run = LocalRun(worker, self._clock, release)
            if has_thread:
                worker.start()
        except BaseException:
            release()
            raise
        return run

    def _open_worker(self, topology: Topology, store: Store, *, writers: int) -> LocalWorker:
        coordinator = Coordinator(
            store,
            topology,
            clock=self._clock,
            rng=self._rng,
            intervals=self._intervals,
            pause_timeout_ms=self._pause_timeout_ms,
            on_held=self._on_held,
            threads=bool(writers),
            upkeep=self._upkeep and replace(self._upkeep, background=bool(writers)),
        )
        coordinator.open()
        progress = Progress(
            topology.name, clock=self._clock, enabled=self._progress, log_every_ms=_LOG_EVERY_MS
        )
        return LocalWorker(
            LocalEngine(
                store,
                coordinator,
                coordinator.names,
                cache_bytes=self._cache_bytes,
                clock=self._clock,
                writers=writers,
                checkpoint_after_ms=self._checkpoint_weak_after_ms,
            ),
            coordinator,
            self._clock,
            progress=progress,
            intake_records_max=self._intake_records_max,
            pause_timeout_ms=self._pause_timeout_ms,
        )


def _consume(run: LocalRun, stream: str, given: RowsLike) -> None:
    """
    Feed a bounded input from where the store stands; its position counts rows.
    """
    rows = rows_from(given)
    run.check_rows(stream, rows)
    known = run.consumed(stream)
    if BOUNDED_SOURCE in known:
        # Another runner has consumed this input to its end.
        return
    foreign = sorted(set(known) - {LOCAL_SOURCE})
    if foreign:
        raise InvalidError(
            "this store has consumed the input through a streaming checkpoint; go on with it, or start a new store",
            input=stream,
            checkpoint=foreign[0],
        )
    consumed = known.get(LOCAL_SOURCE, 0)
    if consumed > row_count(rows):
        raise InvalidError(
            "the store has consumed more of this input than there is: it is another input",
            input=stream,
            rows=row_count(rows),
            consumed=consumed,
        )
    rest = rows.slice(consumed) if isinstance(rows, pa.Table) else rows[consumed:]
    for count, piece in pieces(rest, BUNDLE_RECORDS_MAX):
        consumed += count
        run.consume(stream, piece, InputPosition(stream=stream, source=LOCAL_SOURCE, batch=consumed))


def _nothing() -> None:
    """
    The store belongs to the caller, who closes it.
    """
