"""Supersteps that the driver brings to the homes of slots by itself, on its own machine.

A shuffle and a second stage are most of the time of a small micro-batch. On one machine the rows may as well go through
the driver: one stage of Spark routes them and collects them in Arrow, and the driver hands each slot its own rows. A
superstep without outside input then needs no job of Spark at all. What is known of the last batch says whether the rows
of the next one are few enough to collect, and where that was wrong, Spark runs the superstep as it does a large one.

Spark ends Python workers that have had no task for a minute, so a job that does nothing keeps the homes alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from millpond.executor.spark.hand_over import HomesReached, reach_homes
from millpond.executor.spark.routing import Routed
from millpond.executor.spark.task import make_settling_task
from millpond.executor.spark.task_plan import TARGET, SlotReport, TaskPlan, slots_of_rows
from millpond.statestore.types import Clock

ROWS_MAX: Final = 1 << 20
BYTES_MAX: Final = 64 << 20
"""Rows and bytes in Arrow up to which a batch is collected, because then it takes less time than a shuffle."""

_ROW_IN_PARTITION: Final = f"(monotonically_increasing_id() & {(1 << 33) - 1}L)"
_IDLE_US: Final = 30_000_000
"""Time without a task after which Spark's Python workers get one; Spark ends them after 60 s."""


class DirectRuns:
    """Runs supersteps of one pipeline without Spark's shuffle; used by one thread at a time."""

    def __init__(self, session: SparkSession, slots: int, clock: Clock) -> None:
        self._session = session
        self._slots = slots
        self._clock = clock
        self._job_us = clock.monotonic_us()
        self._rows_max: dict[str, int] = {}
        self._settled, self._settle_again_us = "", 0

    def note_job(self) -> None:
        """Note that Spark's Python workers have just had a task."""
        self._job_us = self._clock.monotonic_us()

    def learn(self, plan: TaskPlan, reports: Iterable[SlotReport]) -> None:
        """Remember how many rows like those of the last batch may be collected; 0 if the last batch had more."""
        if plan.input is None or plan.home_secret is None or not plan.is_one_machine:
            return
        rows = bytes_ = 0
        for report in reports:
            rows, bytes_ = rows + report.arrived_rows, bytes_ + report.arrived_bytes
        if rows:
            limit = min(ROWS_MAX, BYTES_MAX * rows // max(1, bytes_))
            # A power of two or 0, because Spark compiles a query again for each other number in it.
            rows_max = 1 << limit.bit_length() >> 1
            self._rows_max[plan.input.stream] = rows_max if rows <= rows_max else 0

    def takes(self, stream: str) -> bool:
        """Return True if the stream's next batch is likely to have few rows."""
        return bool(self._rows_max.get(stream))

    def run(
        self, plan: TaskPlan, routed: Routed | None, check_running: Callable[[], None]
    ) -> tuple[SlotReport, ...] | None:
        """Run every slot that has work at its home; ``None`` if Spark must run the superstep.

        A slot may have run by then, which is as if Spark had run its task twice.
        """
        if plan.home_secret is None or not plan.is_one_machine:
            return None
        if self._is_idle:
            self._settle(plan)
        reached = self._reach(plan)
        if reached is None:
            return None
        try:
            rows = self._collect(plan, routed)
            if rows is None:
                return None

            def poll() -> None:
                check_running()
                if self._is_idle:
                    self._settle(plan)

            return reached.run(plan, rows, poll)
        finally:
            reached.close()

    def _collect(self, plan: TaskPlan, routed: Routed | None) -> dict[int, list[pa.RecordBatch]] | None:
        """Return the rows of each slot, ``None`` if they are too many, of which few more are read."""
        by_slot: dict[int, list[pa.RecordBatch]] = {}
        if plan.input is None or routed is None:
            return by_slot
        rows_max = self._rows_max[plan.input.stream]
        few: Any = routed.frame.where(f"{_ROW_IN_PARTITION} <= {rows_max}")
        # Not `toArrow`, which makes all times those of UTC, and refuses types that tasks get, such as calendar intervals.
        batches: list[pa.RecordBatch] = few._collect_as_arrow()  # noqa: SLF001
        if sum(batch.num_rows for batch in batches) > rows_max:
            return None
        for batch in pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else ():
            for rows in routed.finish(batch):
                slot_of_row = slots_of_rows(rows.column(TARGET).to_numpy(), self._slots)
                for slot in np.unique(slot_of_row).tolist():
                    by_slot.setdefault(slot, []).append(rows.filter(pa.array(slot_of_row == slot)))
        return by_slot

    def _reach(self, plan: TaskPlan) -> HomesReached | None:
        secret, slots = plan.home_secret or "", sorted(plan.parts)
        reached = reach_homes(secret, slots)
        now_us = self._clock.monotonic_us()
        if reached is None and (secret != self._settled or now_us >= self._settle_again_us):
            # The code is new to the processes, one has ended, or Spark has run the tasks of two slots in one.
            self._settled, self._settle_again_us = secret, now_us + _IDLE_US
            self._settle(plan)
            reached = reach_homes(secret, slots)
        return reached

    @property
    def _is_idle(self) -> bool:
        return self._clock.monotonic_us() - self._job_us > _IDLE_US

    def _settle(self, plan: TaskPlan) -> None:
        """Have Spark's Python workers make homes for all slots, which also keeps Spark from ending them."""
        tasks = self._session.range(0, self._slots, 1, self._slots)
        tasks.mapInArrow(make_settling_task(replace(plan, parts={}, input=None)), "id long").collect()
        self.note_job()
