"""The local runner: a pipeline in this process, without a JVM in the data path (architecture §5).

Use it for tests and development, for services that need ten milliseconds instead of three hundred, and for the
simulation. For a cluster use `SparkRunner`, on the same store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Unpack

from millpond.executor.inputs.extraction import RowsLike
from millpond.executor.local.bounded import consume_inputs, observe_rows, rest_of_inputs
from millpond.executor.local.engine import LocalEngine
from millpond.executor.local.run import LocalRun
from millpond.executor.local.worker import LocalWorker
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.options import LocalRunnerOptions, RunnerOptions
from millpond.executor.run.run import RunSummary
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.arguments import check_flags
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

_WRITERS: Final = 2
_UPKEEP: Final = UpkeepPolicy(compaction=CompactionPolicy(fan_in=32, files_max=128))
"""Wider compactions for a hundred small commits a second; otherwise they take a third of the process (docs/design/003-compaction.md)."""


class LocalRunner:
    """Runs pipelines in this process; all state is in the store, so any process may continue a pipeline.

    Args:
        store: path of the store, created if it does not exist, or an open `Store`, which stays open.
        options: see `LocalRunnerOptions`.

    Raises:
        InvalidError: an option is unknown or out of its range.

    Example::

        runner = LocalRunner("pond")
        runner.run(pipeline, {"queries": rows})     # to the end of the input
        runner.run(pipeline, {"queries": rows}, finish=False)   # more will follow
        with runner.start(pipeline) as run:         # until stopped
            run.inject("queries", {"query": "cat", "time": 5}).wait()
    """

    def __init__(self, store: Store | str | Path, **options: Unpack[LocalRunnerOptions]) -> None:
        known = LocalRunnerOptions.__annotations__
        self._options = RunnerOptions.given(store, options, known, intervals=1, upkeep=_UPKEEP)
        if self._options.upkeep is not None and self._options.upkeep.place == "spark":
            raise InvalidError(
                "there is no Spark in the local runner: compactions go to a process or a thread"
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
        behind them; consumed rows are skipped, and refused if they are others. The rows of one run count
        as having arrived together, so no row makes another row of that run late.

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
        check_flags(finish=finish)
        with self._open(pipeline.check(inputs=inputs), writers=_WRITERS, is_bounded=True) as run:
            given = run.read_inputs(inputs)
            # First, because a backfill may consist of the rows that were consumed.
            rests = rest_of_inputs(run, given)
            run.begin_backfills(given)
            run.finish_backfills()
            consume_inputs(run, rests, finish=finish)
            if finish:
                run.finish_inputs(given)
            else:
                for stream, rows in given.items():
                    observe_rows(run, stream, rows)
                run.come_to_rest()
            run.note_nothing()
            if finish:
                run.note_end()
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
        check_flags(stepping=stepping)
        return self._open(pipeline.check(), writers=0 if stepping else _WRITERS, is_bounded=False)

    def _open(self, topology: Topology, *, writers: int, is_bounded: bool) -> LocalRun:
        def start(store: Store, release: Callable[[], None]) -> LocalRun:
            upkeep = self._options.upkeep
            options = replace(
                self._options, upkeep=None if upkeep is None else replace(upkeep, background=bool(writers))
            )
            coordinator = options.open_coordinator(
                store,
                topology,
                threads=bool(writers),
                row_files=options.disk.tier_of(store.objects, options.clock),
            )
            engine = LocalEngine(coordinator, options, writers=writers)
            worker = LocalWorker(engine, coordinator, options)
            run = LocalRun(worker, self._options.clock, release)
            if not is_bounded:
                try:
                    run.begin_backfills()
                except BaseException:
                    run.abandon()
                    raise
            if writers and not is_bounded:
                worker.start()
            return run

        return self._options.open_run(start)
