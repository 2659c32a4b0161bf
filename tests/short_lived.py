"""
Options for short-lived Java processes: the optimising compiler costs more than it saves in a test.
"""

from __future__ import annotations

from typing import Final

from tests.tidy import ROOT

__all__ = ["CLASSES", "PLAIN_JAVA", "SHORT_LIVED", "SHORT_LIVED_JAVA", "ZOOKEEPER_CLASSES", "ZOOKEEPER_JAVA"]

CLASSES: Final = ROOT / "build" / "spark-classes.jsa"
"""The archive of Spark's classes that ``tests/spark_classes.py`` makes."""

ZOOKEEPER_CLASSES: Final = ROOT / "build" / "zookeeper-classes.jsa"
"""The archive of ZooKeeper's classes that ``tests/zookeeper_classes.py`` makes."""

PLAIN_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of any JVM; a demo needs two thirds of the processor time with them."""

# Java ignores an archive that is missing or not its own, but says so on standard output unless its log is off.
SHORT_LIVED_JAVA: Final = f'{PLAIN_JAVA} -Xshare:auto -XX:SharedArchiveFile="{CLASSES}" -Xlog:disable'
"""Options of a JVM with Spark; a start needs six tenths of the processor time with the archive."""

SHORT_LIVED: Final = {"PYTHONPATH": str(ROOT), "JAVA_TOOL_OPTIONS": SHORT_LIVED_JAVA}
"""Environment of a program of this repository that a test runs, and of every JVM that it starts."""

ZOOKEEPER_JAVA: Final = (
    f'-XX:SharedArchiveFile="{ZOOKEEPER_CLASSES}" -Xlog:disable -XX:CompileThresholdScaling=8'
)
"""More options of a ZooKeeper server: with the archive, and less of it compiled, a start needs half of the time."""
