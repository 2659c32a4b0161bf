"""
A driver that runs the ledger on Spark over a folder of JSON files, from the moment that a test says go.

``python -m millpond.testing.processes.spark_driver STORE HOSTS INPUT`` starts Spark and prints ``ready``. On a line
from standard input it starts the pipeline and prints ``started``, then what happens: the class and text of the error
that ended the run. ``jvm`` as a fourth argument prints the process id of Spark's JVM after ``started``, waits for
another line, and prints what the run, which has lost its JVM by then, answers.
"""

from __future__ import annotations

import sys
from typing import Final

from millpond.executor.spark.run import SparkRun
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import spark_session
from millpond.statestore.errors import MillpondError
from millpond.statestore.store import Store
from millpond.testing.processes.ledger import ROWS, ledger_pipeline

__all__ = ["SCHEMA", "main"]

SCHEMA: Final = "k string, t long, id string, n long"
"""The columns of the files."""

_POLL_MS: Final = 1_000


def main(arguments: list[str]) -> None:
    """
    Wait for the word, and run.
    """
    path, hosts, folder, *rest = arguments
    spark = spark_session("driver", master="local[1]", options={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    frame = spark.readStream.schema(SCHEMA).json(folder)
    _say("ready")
    sys.stdin.readline()
    with Store.open(path, zookeeper=hosts) as store:
        runner = SparkRunner(store, spark=spark, intervals=1, progress=False)
        try:
            run = runner.start(ledger_pipeline(), {ROWS: frame})
        except MillpondError as error:
            _say(f"{type(error).__name__} {error}")
            return
        _say("started")
        if rest:
            _lose_the_jvm(run)
        else:
            _watch(run)


def _watch(run: SparkRun) -> None:
    try:
        while not run.await_termination(_POLL_MS):
            pass
    except MillpondError as error:
        run.abandon()
        _say(f"{type(error).__name__} {error}")


def _lose_the_jvm(run: SparkRun) -> None:
    from pyspark import SparkContext

    gateway = SparkContext._gateway  # noqa: SLF001 - the only way to know the JVM's process
    assert gateway is not None
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
