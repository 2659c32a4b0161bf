"""
The Spark session: the one that is running, or one made with what Millpond and Delta need.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CHECKPOINT_MANAGER", "spark_has_delta", "spark_session"]

CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""
Checkpoint manager for local paths: without Hadoop's native library the default one forks a
process for each file's permissions, 170 ms a micro-batch. Object stores keep Spark's default.
"""


def spark_session(
    application: str = "millpond", *, master: str | None = None, options: dict[str, str] | None = None
) -> SparkSession:
    """
    The active Spark session, else a new one with Delta Lake's jars and local checkpoints that are fast.

    The jars are resolved with Ivy, which takes some seconds and, the first time, the network. Where they are among
    Spark's own, in ``$SPARK_HOME/jars``, those are used.

    Args:
        application: the new session's name.
        master: where it runs; ``None`` leaves it to Spark's own configuration, else ``local[*]``.
        options: further Spark settings, which win over Millpond's.

    Returns:
        A session; an active one is returned as it is, whatever its settings.
    """
    # Workers would otherwise start whatever `python3` is first on the path, without our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    builder = SparkSession.builder.appName(application)
    if master is not None or "SPARK_REMOTE" not in os.environ:
        builder = builder.master(master or os.environ.get("MASTER", "local[*]"))
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_MANAGER,
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        **(options or {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return (builder if spark_has_delta() else configure_spark_with_delta_pip(builder)).getOrCreate()


def spark_has_delta() -> bool:
    """
    Whether Delta's jars are among those of the Spark installation, so that none need be resolved.
    """
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return any(Path(home, "jars").glob("delta-spark_*.jar"))
