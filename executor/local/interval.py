"""
One interval of a local run: its soft state, and the steps of a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from millpond.executor.bundle.bundle import Bundle, Deliveries
from millpond.executor.bundle.processor import IntervalProcessor
from millpond.executor.bundle.result import BundleResult, Manifest
from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.weak import STRONG, WeakStreams
from millpond.executor.soft_state.soft_state import SoftState, StoreRowReader
from millpond.executor.superstep.delivery import flatten_productions
from millpond.executor.superstep.plan import IntervalPlan, SuperstepPlan
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.types import Objects

__all__ = ["LocalInterval"]


class LocalInterval:
    """
    What this process keeps of an interval between supersteps; all of it can be rebuilt.

    A bundle takes four steps: `process`, `write` (which any thread may do), `finish`, and
    `confirm` once it has been committed. After one that was not confirmed, the next `process`
    looks at the committed files first and takes back what was not among them.

    Args:
        node: the computation.
        interval: whose keys.
        objects: where row files are.
        row_format: how they are encoded.
        cache_bytes: soft-state budget.
        on_stuck: told if user code takes longer than it may and cannot be interrupted.
    """

    def __init__(
        self,
        node: ComputationNode,
        interval: Interval,
        objects: Objects,
        row_format: RowFormat,
        cache_bytes: int,
        on_stuck: OnStuck | None = None,
    ) -> None:
        self._objects = objects
        self._row_format = row_format
        self._soft_state = SoftState(interval, StoreRowReader(objects), cache_bytes)
        self._processor = IntervalProcessor(node, interval, self._soft_state, on_stuck)
        self._is_behind = True
        self._has_followed = False

    def process(
        self,
        plan: SuperstepPlan,
        part: IntervalPlan,
        deliveries: Sequence[Deliveries],
        snapshot: Snapshot,
        weak: WeakStreams = STRONG,
    ) -> BundleResult:
        """
        Run the user's code for a bundle; nothing is written yet.
        """
        if self._is_behind:
            # Before it looks: whoever makes it fall behind from here on may have come too late to be seen.
            self._has_followed = True
            self._soft_state.synchronise(snapshot.files_of(part.interval))
        self._is_behind = True
        return self._processor.process(
            Bundle(
                interval=part.interval,
                fence=part.fence,
                superstep=plan.superstep,
                watermark=part.watermark,
                wall_time=plan.wall_time,
                deliveries=deliveries,
                percentile_watermarks=part.percentile_watermarks,
                weak=weak,
            )
        )

    def restamped(self, result: BundleResult, plan: SuperstepPlan, part: IntervalPlan) -> BundleResult:
        """
        What `process` returned in another superstep that has not got it, as part of this one.
        """
        stamps = (
            ("sequencer", part.fence.sequencer),
            ("commit_number", part.fence.commit_number),
            ("superstep", plan.superstep),
        )
        updates = result.updates
        for name, value in stamps:
            if updates is None:
                break
            column = pa.array(np.full(updates.num_rows, value, np.int64))
            updates = updates.set_column(updates.schema.get_field_index(name), ROW_SCHEMA.field(name), column)
        weak = result.weak
        if weak is not None:
            weak = replace(weak, draft=weak.draft.restamped(part.fence, plan.superstep))
        return replace(result, updates=updates, weak=weak)

    def fall_behind(self) -> None:
        """
        Somebody else has changed the table: look at the committed files before the next bundle.
        """
        self._is_behind = True
        self._has_followed = False

    def write(
        self, plan: SuperstepPlan, part: IntervalPlan, updates: pa.Table | None, token: str
    ) -> RowFile | None:
        """
        Write a bundle's row updates, uncommitted.
        """
        if updates is None:
            return None
        file = write_row_file(
            self._objects,
            part.interval,
            updates,
            superstep=plan.superstep,
            fence=part.fence,
            token=token,
            row_format=self._row_format,
        )
        reach("superstep.file_written")
        return file

    def finish(
        self, part: IntervalPlan, result: BundleResult, file: RowFile | None
    ) -> tuple[Manifest, pa.Table | None]:
        """
        What the commit needs of a bundle, and its productions beside.
        """
        self._soft_state.adopt(file)
        productions = flatten_productions(result.updates) if result.productions else None
        manifest = Manifest(
            interval=part.interval,
            fence=part.fence,
            file=file,
            result=replace(result, updates=None, weak=None),
        )
        return manifest, productions

    def confirm(self, file: RowFile | None) -> None:
        """
        The file of the last bundle has been committed, and nobody else has changed anything.
        """
        self._soft_state.confirm(file)
        # A bundle that was left behind may have looked before somebody else's commit.
        self._is_behind = not self._has_followed
