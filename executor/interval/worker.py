"""The interval worker: runs one interval's bundles against soft state that follows the committed files.

Both runners use it: a Spark task runs a bundle in one call (`IntervalWorker.run`), the local engine step by step, so
that the files of several intervals are written in parallel. User code runs in `process`; the bundle counts only once
the coordinator commits its manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

from millpond.executor.computation.state import StateLayout
from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.interval.bundle import Bundle
from millpond.executor.interval.processor import IntervalProcessor
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_reader import RowReader
from millpond.executor.interval.row_update import BundleResult, Manifest
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.statestore.errors import check
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.rows.files import PARQUET, RowFile, write_row_file
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.system import collector_slowed
from millpond.statestore.types import Objects


class WorkerState(Enum):
    """A worker's knowledge of the committed files."""

    BEHIND = auto()
    """Another writer may have committed since soft state last followed the files."""

    RAN = auto()
    """A bundle has run since soft state last followed the files; its commit is not confirmed."""

    FOLLOWING = auto()
    """Soft state agrees with the committed files."""


class IntervalWorker:
    """Runs the bundles of one interval; everything it remembers can be rebuilt from committed files.

    A bundle takes four steps: `process`, `write` (on any thread), `finish`, and `confirm` once the manifest is
    committed. If a bundle is not confirmed, the next `process` reads the committed files first and undoes the bundle
    if it is not among them. Only `fall_behind` and `write` may be called while `process` runs on another thread.
    The stopwatch is in microseconds.
    """

    def __init__(
        self,
        node: ComputationNode,
        interval: Interval,
        objects: Objects,
        *,
        row_format: RowFormat = PARQUET,
        memory: MemoryBudget,
        stopwatch: Callable[[], int],
        on_stuck: OnStuck | None = None,
    ) -> None:
        self._interval = interval
        self._objects = objects
        self._row_format = row_format
        reader = RowReader(objects)
        self._soft_state = SoftState(
            interval,
            reader,
            memory,
            keeps_records=node.time_sorted,
            layout=StateLayout.of(node.computation),
        )
        self._on_stuck = on_stuck
        self._processor = IntervalProcessor(node, interval, self._soft_state, on_stuck)
        self._stopwatch = stopwatch
        self._work_us = 0
        self.state: WorkerState = WorkerState.BEHIND
        self._transition = threading.Lock()

    def shrink(self) -> None:
        """Evict rows that other intervals of the process need memory for; no other step may run at the same time."""
        self._soft_state.shrink()

    def take_code(self, node: ComputationNode) -> None:
        """Run other code from now on, between two bundles; ``time_sorted`` and the layout of states must not differ.

        Soft state holds rows in their stored form, so it stays.
        """
        self._processor = IntervalProcessor(node, self._interval, self._soft_state, self._on_stuck)

    def leave(self) -> None:
        self._soft_state.leave()

    def run(self, bundle: Bundle, files: Callable[[], Sequence[LiveFile]], token: str) -> Manifest:
        """Process a bundle and write its row file, uncommitted; after a failure soft state is empty.

        ``files`` is as for `process`; ``token`` makes the file's name unique.
        """
        try:
            result = self.process(bundle, files)
            return self.finish(bundle, result, self.write(bundle, result, token))
        except BaseException:
            self._soft_state.reset()
            self.fall_behind()
            raise

    def process(self, bundle: Bundle, files: Callable[[], Sequence[LiveFile]]) -> BundleResult:
        """Run user code for a bundle; nothing is written yet.

        ``files`` returns the live files that may hold the interval's rows. It is called only if soft state may differ
        from them, so a superstep does not cost more as files accumulate.
        """
        began_us = self._stopwatch()
        with self._transition:
            # The state changes before the files are read: a later `fall_behind` may concern a commit that this
            # bundle does not see, so it must outlast the bundle.
            is_following = self.state is WorkerState.FOLLOWING
            self.state = WorkerState.RAN
        if not is_following:
            self._soft_state.synchronise(files())
        with collector_slowed():
            result = self._processor.process(bundle)
        self._work_us = self._stopwatch() - began_us
        return result

    def write(self, bundle: Bundle, result: BundleResult, token: str) -> RowFile | None:
        if result.updates is None:
            return None
        file = write_row_file(
            self._objects,
            self._interval,
            result.updates,
            superstep=bundle.superstep,
            fence=bundle.plan.fence,
            token=token,
            row_format=self._row_format,
        )
        # A crash here leaves a file that no commit names; gc removes it.
        reach("superstep.file_written")
        return file

    def finish(self, bundle: Bundle, result: BundleResult, file: RowFile | None) -> Manifest:
        """Associate soft state with the written file, and return the manifest to be committed."""
        check(self.state is not WorkerState.FOLLOWING, "a bundle is finished after it ran", state=self.state)
        # The commit may still fail, so soft state keeps what it needs to undo the bundle.
        self._soft_state.adopt(file)
        return Manifest(
            interval=self._interval,
            fence=bundle.plan.fence,
            file=file,
            # The updates are in the file: the manifest travels to the driver, and must stay small.
            result=replace(result, updates=None, weak=None),
            work_us=self._work_us,
        )

    def confirm(self, file: RowFile | None) -> None:
        """Record that the last bundle was committed, as part of a version that nothing else changed."""
        check(
            self.state is not WorkerState.FOLLOWING,
            "a bundle is confirmed once, after it ran",
            state=self.state,
        )
        self._soft_state.confirm(file)
        with self._transition:
            # A bundle that outlived its superstep may have read the files before another writer's commit.
            if self.state is WorkerState.RAN:
                self.state = WorkerState.FOLLOWING

    def fall_behind(self) -> None:
        """Record that another writer has committed: the next bundle reads the committed files first."""
        with self._transition:
            self.state = WorkerState.BEHIND
