"""
One interval of a local run: its soft state, and the steps of a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from millpond.executor.bundle import Bundle, BundleResult, Deliveries, Manifest
from millpond.executor.delivery import flatten_productions
from millpond.executor.interval_processor import IntervalProcessor
from millpond.executor.soft_state import SoftState, StoreRowReader
from millpond.executor.superstep_plan import IntervalPlan, SuperstepPlan
from millpond.executor.topology import ComputationNode
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.rowfile import RowFile, write_row_file
from millpond.statestore.snapshot import Snapshot
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
        cache_bytes: soft-state budget.
    """

    def __init__(self, node: ComputationNode, interval: Interval, objects: Objects, cache_bytes: int) -> None:
        self._objects = objects
        self._soft_state = SoftState(interval, StoreRowReader(objects), cache_bytes)
        self._processor = IntervalProcessor(node, interval, self._soft_state)
        self.is_behind = True

    def process(
        self, plan: SuperstepPlan, part: IntervalPlan, deliveries: Sequence[Deliveries], snapshot: Snapshot
    ) -> BundleResult:
        """
        Run the user's code for a bundle; nothing is written yet.
        """
        if self.is_behind:
            self._soft_state.synchronise(snapshot.files_of(part.interval))
        self.is_behind = True
        return self._processor.process(
            Bundle(
                interval=part.interval,
                fence=part.fence,
                superstep=plan.superstep,
                watermark=part.watermark,
                wall_time=plan.wall_time,
                deliveries=deliveries,
                marks=part.marks,
            )
        )

    def write(
        self, plan: SuperstepPlan, part: IntervalPlan, updates: pa.Table | None, token: str
    ) -> RowFile | None:
        """
        Write a bundle's row updates, uncommitted.
        """
        if updates is None:
            return None
        file = write_row_file(
            self._objects, part.interval, updates, superstep=plan.superstep, fence=part.fence, token=token
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
            interval=part.interval, fence=part.fence, file=file, result=replace(result, updates=None)
        )
        return manifest, productions

    def confirm(self, file: RowFile | None) -> None:
        """
        The file of the last bundle has been committed, and nobody else has changed anything.
        """
        self._soft_state.confirm(file)
        self.is_behind = False
