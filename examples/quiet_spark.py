"""A Spark session whose own words go into a file: it has much to say, and little to who watches a demo."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.executor.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def quiet_spark(name: str, *, master: str, log: Path, options: dict[str, str] | None = None) -> SparkSession:
    """Start Spark for Millpond.

    Args:
        name: the application.
        master: where it runs.
        log: the file that gets what Spark and its workers write to their standard error.
        options: further settings.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    settings = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"} | (options or {})
    with _stderr_into(log):
        return spark_session(name, master=master, options=settings)


@contextmanager
def _stderr_into(path: Path) -> Iterator[None]:
    """What is started meanwhile keeps the file as its standard error; we get ours back."""
    sys.stderr.flush()
    ours = os.dup(2)
    try:
        with path.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)
