"""A Spark cluster of several processes on this machine.

Spark's ``local-cluster`` master starts executors as processes under this user, on the loopback interface. It
needs ``SPARK_HOME``, and leaves its executors' folders there. If the variable is not set, it becomes a
folder of links to PySpark's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.executor.spark.session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def local_cluster(
    folder: Path, executors: int, *, cores: int = 1, options: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a session on executors of a gigabyte each, whose files are in ``folder``.

    Args:
        folder: scratch space.
        executors: how many.
        cores: how many tasks each runs at once.
        options: further settings of Spark.
    """
    if "SPARK_HOME" not in os.environ:
        os.environ["SPARK_HOME"] = str(_spark_home(folder))
    return spark_session(
        "local-cluster",
        master=f"local-cluster[{executors},{cores},1024]",
        options={
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "1g",
            "spark.executor.cores": str(cores),
            "spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "spark.executorEnv.PYSPARK_PYTHON": sys.executable,
            "spark.deploy.maxExecutorRetries": "-1",
            "spark.ui.enabled": "false",
            "spark.local.dir": str(folder / "scratch"),
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            **(options or {}),
        },
    )


def _spark_home(folder: Path) -> Path:
    import pyspark

    home = folder / "spark-home"
    home.mkdir(parents=True, exist_ok=True)
    for entry in Path(pyspark.__file__).parent.iterdir():
        link = home / entry.name
        if entry.name != "work" and not link.exists():
            link.symlink_to(entry)
    return home
