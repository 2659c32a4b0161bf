"""The environment of short-lived Spark programs: a quick start, and Java without its optimising compiler."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from tests.tidy import ROOT

CLASSES: Final = ROOT / "build" / "spark-classes.jsa"
"""The archive of Spark's classes that ``tests/spark_classes.py`` makes."""

ZOOKEEPER_CLASSES: Final = ROOT / "build" / "zookeeper-classes.jsa"
"""The archive of ZooKeeper's classes that ``tests/zookeeper_classes.py`` makes."""

SPARK_HOME: Final = ROOT / "build" / f"spark-{version('pyspark')}-delta-{version('delta-spark')}"
"""A Spark with Delta's jars among its own, in links; made together with the archive, which is of this class path."""

SPARK_SETTINGS: Final = SPARK_HOME / "settings.conf"
"""Spark's settings in all programs that tests start, unless the programs set others."""

LAUNCHER: Final = SPARK_HOME / "launcher.jsa"
"""The archive of the classes of the JVM that makes the command line of Spark's JVM."""

INTERPRETED_PLANS: Final = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""Settings with which Spark interprets its plans: to compile one costs more than to run it once on some rows."""

COMPILED_PLANS: Final = {
    "spark.sql.codegen.wholeStage": "true",
    "spark.sql.codegen.factoryMode": "FALLBACK",
}
"""Spark's own: those of the session that tests share, which does what it does at a user's."""

PLAIN_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of any JVM; a demo needs two thirds of the processor time with them."""

# Java ignores a missing or foreign archive, but logs that on standard output unless its log is off.
SHORT_LIVED_JAVA: Final = f'{PLAIN_JAVA} -Xshare:auto -XX:SharedArchiveFile="{CLASSES}" -Xlog:disable'
"""Options of a JVM with Spark; a start needs half of the processor time with the archive."""


def spark_environment() -> dict[str, str]:
    """Return environment variables that let PySpark start the Spark of `SPARK_HOME`, if it exists."""
    if not SPARK_SETTINGS.exists():
        return {}
    settings = f'--properties-file "{SPARK_SETTINGS}" pyspark-shell'
    environment = {"SPARK_HOME": str(SPARK_HOME), "PYSPARK_SUBMIT_ARGS": settings}
    if " " not in str(LAUNCHER):
        # Spark's script splits these options at spaces, quoted or not.
        environment["SPARK_LAUNCHER_OPTS"] = f"{PLAIN_JAVA} -XX:SharedArchiveFile={LAUNCHER} -Xlog:disable"
    return environment


SHORT_LIVED: Final = {
    "PYTHONPATH": str(ROOT),
    "JAVA_TOOL_OPTIONS": SHORT_LIVED_JAVA,
    **spark_environment(),
}
"""Environment of a program of this repository that a test runs, and of every JVM that it starts."""

ZOOKEEPER_JAVA: Final = (
    f'-XX:SharedArchiveFile="{ZOOKEEPER_CLASSES}" -Xlog:disable -XX:CompileThresholdScaling=8'
)
"""More options of a ZooKeeper server: with the archive, and less of it compiled, a start needs half of the time."""
