"""
The Spark session: the one that is running, or one made with what Millpond and Delta need.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "CHECKPOINT_MANAGER",
    "DAEMON",
    "daemon_settings",
    "is_one_machine",
    "spark_has_delta",
    "spark_session",
]

CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""
Checkpoint manager for local paths: without Hadoop's native library the default one forks a
process for each file's permissions, 170 ms a micro-batch. Object stores keep Spark's default.
"""

DAEMON: Final = "millpond.executor.python_workers.daemon"
"""The module that forks the Python workers of a local session; it has imported what they need."""


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
    if master is None and "SPARK_REMOTE" not in os.environ:
        master = os.environ.get("MASTER", "local[*]")
    if master is not None:
        builder = builder.master(master)
    settings = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_MANAGER,
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        **daemon_settings((options or {}).get("spark.master", master), os.environ),
        **(options or {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return (builder if spark_has_delta() else configure_spark_with_delta_pip(builder)).getOrCreate()


def is_one_machine(master: str) -> bool:
    """
    Whether a Spark master runs tasks on the driver's machine.

    Example:
        >>> [is_one_machine(master) for master in ("local", "local[2]", "spark://host:7077", "yarn")]
        [True, True, False, False]
    """
    return master.partition("[")[0] == "local"


def daemon_settings(
    master: str | None, environment: Mapping[str, str], platform: str = sys.platform
) -> dict[str, str]:
    """
    Settings that have Python workers forked by `DAEMON`, where it surely finds what it imports and can be forked after.

    Args:
        master: where Spark runs, if known.
        environment: this process's environment variables.
        platform: the operating system.

    Returns:
        None for a cluster, whose machines may get this package with the job, for a program that `spark-submit` has
        started, for another interpreter or a package that is not installed, and for systems other than Linux, some of
        whose libraries do not survive a fork.
    """
    is_here = master is not None and is_one_machine(master)
    is_own = environment.get("PYSPARK_PYTHON") == sys.executable and "PYSPARK_GATEWAY_PORT" not in environment
    if not (is_here and is_own and platform == "linux"):
        return {}
    try:
        version("millpond")
    except PackageNotFoundError:
        return {}
    return {"spark.python.daemon.module": DAEMON}


def spark_has_delta() -> bool:
    """
    Whether Delta's jars are among those of the Spark installation, so that none need be resolved.
    """
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return any(Path(home, "jars").glob("delta-spark_*.jar"))
