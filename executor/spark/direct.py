"""Direct supersteps: the driver brings rows to the homes of slots on its own machine, without a shuffle.

A shuffle and a second stage take most of the time of a small micro-batch. On one machine the driver collects the rows
in one stage of Spark, routes them in Arrow, and hands each slot its own rows. A superstep without outside input needs no
Spark job at all.

The size of the last batch predicts the size of the next one. After a wrong prediction Spark runs the superstep as
tasks, which is also how it runs every large batch.

Spark ends Python workers that have had no task for a minute, so a short job keeps the homes alive.
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
"""Limits of a batch that the driver collects, in rows and in bytes of Arrow."""

_ROW_IN_PARTITION: Final = f"(monotonically_increasing_id() & {(1 << 33) - 1}L)"
_UNMEASURED: Final = (1 << 31) - 1
"""The value of `maxBytesPerBatch` for which Spark measures nothing."""
_MARGIN: Final = 4
"""How many times larger than in the last batch records may be before an unmeasured batch exceeds Spark's limit."""
_IDLE_US: Final = 30_000_000
"""Time after which an idle Python worker gets a task; Spark ends idle workers after 60 s."""


class InputSizes:
    """The sizes of each stream's last batch, which predict those of the next one."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}
        self._limits: dict[str, int] = {}

    def learn(self, plan: TaskPlan, reports: Iterable[SlotReport]) -> None:
        """Record the size of a superstep's input."""
        if plan.input is None:
            return
        rows = bytes_ = 0
        for report in reports:
            rows, bytes_ = rows + report.arrived_rows, bytes_ + report.arrived_bytes
        if rows:
            self._last[plan.input.stream] = rows, bytes_

    def rows_to_collect(self, stream: str) -> int:
        """Return how many rows of the next batch the driver may collect; 0 if the last batch was too large."""
        rows, bytes_ = self._last.get(stream, (0, 0))
        limit = min(ROWS_MAX, BYTES_MAX * rows // max(1, bytes_))
        # A power of two or 0, because Spark compiles a query again for each other number in it.
        rows_max = 1 << limit.bit_length() >> 1
        return rows_max if rows <= rows_max else 0

    def limit_batches(self, session: SparkSession, stream: str, *, is_known: bool) -> None:
        """Set in a session of Millpond's own whether Spark measures the Arrow batches of a stream's next superstep.

        To end a batch at `maxBytesPerBatch`, Spark adds up the sizes of all columns after each row: a third of the JVM's
        time in a large superstep. Where `maxRecordsPerBatch` small rows end it first, that never finds anything.
        ``is_known`` tells that all rows are the stream's.
        """
        settings: Any = session._jsparkSession.sessionState().conf()  # noqa: SLF001
        limit, batch_rows = settings.arrowMaxBytesPerBatch(), settings.arrowMaxRecordsPerBatch()
        if limit != _UNMEASURED:
            self._limits[stream] = limit
        rows, bytes_ = self._last.get(stream, (0, 0))
        own = self._limits.get(stream, _UNMEASURED)
        is_small = rows > 0 and batch_rows > 0 and bytes_ * batch_rows * _MARGIN <= own * rows
        wanted = _UNMEASURED if is_small and is_known else own
        if wanted != limit:
            session.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", str(wanted))


class DirectRuns:
    """Runs supersteps of one pipeline without Spark's shuffle; used by one thread at a time."""

    def __init__(self, session: SparkSession, slots: int, clock: Clock, sizes: InputSizes) -> None:
        self._session = session
        self._slots = slots
        self._clock = clock
        self._job_us = clock.monotonic_us()
        self._sizes = sizes
        self._settled, self._settle_again_us = "", 0

    def note_job(self) -> None:
        """Record that Spark's Python workers have just run tasks."""
        self._job_us = self._clock.monotonic_us()

    def run(
        self, plan: TaskPlan, routed: Routed | None, check_running: Callable[[], None]
    ) -> tuple[SlotReport, ...] | None:
        """Run every slot that has work at its home; ``None`` if Spark must run the superstep as tasks.

        Some slots may have run before ``None`` is returned. Running them again is safe, because a task is pure.
        """
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
        """Return the rows by slot, or ``None`` if there are too many; the filter bounds how many are read to find that out."""
        by_slot: dict[int, list[pa.RecordBatch]] = {}
        if plan.input is None or routed is None:
            return by_slot
        rows_max = self._sizes.rows_to_collect(plan.input.stream)
        few: Any = routed.frame.where(f"{_ROW_IN_PARTITION} <= {rows_max}")
        # Not `toArrow`: it converts times to UTC, and refuses types that tasks receive, such as calendar intervals.
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
            # The processes lack the code, one of them has ended, or Spark has run two slots in one process.
            self._settled, self._settle_again_us = secret, now_us + _IDLE_US
            self._settle(plan)
            reached = reach_homes(secret, slots)
        return reached

    @property
    def _is_idle(self) -> bool:
        return self._clock.monotonic_us() - self._job_us > _IDLE_US

    def _settle(self, plan: TaskPlan) -> None:
        """Run a job that gives each slot a home and keeps Spark from ending the workers."""
        tasks = self._session.range(0, self._slots, 1, self._slots)
        tasks.mapInArrow(make_settling_task(replace(plan, parts={}, input=None)), "id long").collect()
        self.note_job()
