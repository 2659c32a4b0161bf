"""A ledger on Spark whose tasks fail and whose workers die at their first attempt.

``python -m tests.processes.spark_task_failures STORE MARKS`` runs it to the end on ``local[2,3]``
(three attempts per task), over leases in memory, and prints the ledger as JSON. Each failure leaves
a file in the folder ``MARKS`` and does not happen again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import spark_session
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.rows.codec import JsonCodec
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.processes.ledger import ROWS, Ledger, ledger_of, ledger_pipeline, numbered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCHES: Final = (range(20), range(20, 40), range(40, 60))
"""Record numbers, one list per superstep."""

_FAILS: Final = 27
_DIES: Final = 48


class TaskFailedError(BaseException):
    """Fails the task, not the record: the engine handles only an `Exception`."""


class Doomed(Ledger):
    """Fails at one record and kills its process at another, once each, after processing the record.

    Args:
        marks: folder in which a file is left for each failure.
    """

    def __init__(self, marks: str) -> None:
        self._marks = Path(marks)

    def process_record(self, context: Context, record: Record) -> None:
        """Process the record as the ledger does; then fail once, at the chosen records."""
        super().process_record(context, record)
        number = record.value["n"]
        if number == _FAILS and self._for_the_first_time("failed"):
            raise TaskFailedError(number)
        if number == _DIES and self._for_the_first_time("died"):
            os.kill(os.getpid(), signal.SIGKILL)

    def _for_the_first_time(self, what: str) -> bool:
        try:
            (self._marks / what).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def main(arguments: list[str]) -> None:
    path, marks = arguments
    clock, registry = SystemClock(), MemoryRegistry()
    spark = spark_session("doomed", master="local[2,3]", options={"spark.ui.enabled": "false"})

    def batch(number: int) -> tuple[DataFrame, InputPosition]:
        rows = [tuple(row.values()) for row in numbered(BATCHES[number])]
        frame = spark.createDataFrame(rows, "k string, t long, id string, n long")
        return frame, InputPosition(stream=ROWS, source="test", batch=number)

    with Store.open(
        path, leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id)
    ) as store:
        runner = SparkRunner(store, spark=spark, intervals=2, progress=False)
        run = runner.open(ledger_pipeline(computation=Doomed(marks)))
        for number in range(len(BATCHES)):
            run.consume(*batch(number))
        run.stop()
        sys.stdout.write(JsonCodec().encode(ledger_of(store)) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
