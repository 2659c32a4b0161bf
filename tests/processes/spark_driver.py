"""A driver that runs the ledger on Spark over a folder of JSON files, starting on command.

``python -m tests.processes.spark_driver STORE HOSTS INPUT`` starts Spark and prints ``ready``. On a line
from standard input it starts the pipeline and prints ``started``. When the run fails, it prints the class
and text of the error, and waits for the next line to start once more. On a line while the run is active, it
prints the process id of Spark's JVM and waits for another line. The test kills the JVM before that line; the
driver prints the run's answers, and ends.
"""

from __future__ import annotations

import select
import sys
from typing import Final

from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import spark_session
from millpond.statestore.errors import MillpondError
from millpond.statestore.store import Store
from millpond.testing.processes.ledger import ROWS, ledger_pipeline

SCHEMA: Final = "k string, t long, id string, n long"
"""The columns of the files."""

_POLL: Final = "1s"


def main(arguments: list[str]) -> None:
    path, hosts, folder = arguments
    spark = spark_session("driver", master="local[1]", options={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.readStream.schema(SCHEMA).json(folder)
    _say("ready")
    is_alive = True
    while is_alive and sys.stdin.readline():
        with Store.open(path, zookeeper=hosts) as store:
            runner = SparkRunner(store, spark=spark, intervals=1, progress=False)
            try:
                run = runner.start(ledger_pipeline(), {ROWS: frame})
            except MillpondError as error:
                _say(f"{type(error).__name__} {error}")
                continue
            _say("started")
            is_alive = _watch(run)


def _watch(run: SparkRun) -> bool:
    """Watch a run to its end; return True if Spark's JVM is alive then."""
    try:
        while not run.await_termination(_POLL):
            if _is_told():
                _lose_the_jvm(run)
                return False
    except MillpondError as error:
        run.abandon()
        _say(f"{type(error).__name__} {error}")
    return True


def _is_told() -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)


def _lose_the_jvm(run: SparkRun) -> None:
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    assert gateway is not None
    sys.stdin.readline()
    _say(str(gateway.proc.pid))
    sys.stdin.readline()
    gateway.proc.wait()
    for ask in (
        lambda: run.is_active,
        run.await_termination,
        run.advance,
        run.has_work,
        lambda: run.is_active,
        run.stop,
    ):
        try:
            _say(str(ask()))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            _say(f"{type(error).__name__} {error}")


def _say(text: str) -> None:
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
