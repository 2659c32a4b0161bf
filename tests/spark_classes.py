"""A Spark for tests: Delta's jars among Spark's own, and an archive of the classes that a run loads.

Java maps the archived classes, already parsed and verified, into the memory of the next JVM. It archives
only classes of the class path, and only for the same class path. Tests start some twenty Spark drivers.
``make test`` runs this module once before; without it, or with another Java, tests are only slower.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyspark
from delta import configure_spark_with_delta_pip
from pyspark import SparkContext
from pyspark.conf import SparkConf
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from examples.zeitgeist.__main__ import main as demo
from millpond.executor.spark.session import spark_session
from tests.short_lived import (
    CLASSES,
    COMPILED_PLANS,
    INTERPRETED_PLANS,
    LAUNCHER,
    PLAIN_JAVA,
    SHORT_LIVED_JAVA,
    SPARK_HOME,
    SPARK_SETTINGS,
)
from tests.tidy import ROOT

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

_SETTINGS: Final = {
    "spark.driver.extraJavaOptions": SHORT_LIVED_JAVA,
    # An idle query would look for new files a hundred times a second.
    "spark.sql.streaming.pollingDelay": "100ms",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    **INTERPRETED_PLANS,
}
_PACKAGES: Final = "spark.jars.packages"
_VERSION: Final = re.compile(r"-\d[\w.-]*\.jar$")
_DEMO: Final = ("--first", "2013-01-25", "--last", "2013-01-27", "--flights-per-file", "1400")


def install(home: Path, settings: Path) -> None:
    """Make a Spark of links: PySpark's, and Delta's jars that Spark does not have in another version.

    Args:
        home: the folder; made again if it is there.
        settings: a file in it that gets the settings; it is written last.
    """
    shutil.rmtree(home, ignore_errors=True)
    (home / "jars").mkdir(parents=True)
    own = Path(pyspark.__file__).parent
    for name in ("bin", "python"):
        (home / name).symlink_to(own / name)
    jars = {path.name: path for path in (own / "jars").iterdir()}
    products = {_VERSION.sub("", name) for name in jars}
    for path in _resolved():
        # Ivy puts the group's name before the jar's.
        name = path.name.partition("_")[2]
        if _VERSION.sub("", name) not in products:
            jars[name] = path
    for name, path in jars.items():
        (home / "jars" / name).symlink_to(path)
    settings.write_text("".join(f"{name} {value}\n" for name, value in _SETTINGS.items()), encoding="utf-8")


def _resolved() -> list[Path]:
    """Return the jars of Delta in Ivy's cache."""
    packages = configure_spark_with_delta_pip(SparkSession.builder)._options[_PACKAGES]
    gateway = launch_gateway(SparkConf(loadDefaults=False).set(_PACKAGES, packages))
    jars = gateway.jvm.System.getProperty("spark.jars")
    _end(gateway)
    return [Path(jar.removeprefix("file://")) for jar in jars.split(",")]


def archive(file: Path) -> None:
    """Archive the classes of a run of the demo and of other tests, after a clean end of Spark."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    options = {
        **_SETTINGS,
        "spark.driver.extraJavaOptions": f'{PLAIN_JAVA} -XX:ArchiveClassesAtExit="{unfinished}" -Xlog:disable',
    }
    os.environ["SPARK_HOME"] = str(SPARK_HOME)
    if " " not in str(LAUNCHER):
        os.environ["SPARK_LAUNCHER_OPTS"] = f"{PLAIN_JAVA} -XX:ArchiveClassesAtExit={LAUNCHER} -Xlog:disable"
    # The demo finds this session, uses it and stops it.
    spark = spark_session("classes", master="local[2]", options=options)
    spark.sparkContext.setLogLevel("OFF")
    gateway = SparkContext._gateway
    with tempfile.TemporaryDirectory() as folder:
        # The tests' shared session compiles its plans, separate programs do not.
        _set(spark, COMPILED_PLANS)
        _stream(spark, folder)
        _set(spark, INTERPRETED_PLANS)
        demo(["--output", f"{folder}/demo", *_DEMO], standalone_mode=False)
    _end(gateway)
    unfinished.replace(file)


def _set(spark: SparkSession, settings: dict[str, str]) -> None:
    for name, value in settings.items():
        spark.conf.set(name, value)


def _stream(spark: SparkSession, folder: str) -> None:
    table = f"{folder}/table"
    spark.range(100).selectExpr("cast(id as string) as key", "id").write.format("delta").save(table)
    spark.read.format("delta").load(table).write.json(f"{folder}/json")
    frames = {
        "delta": spark.readStream.format("delta").load(table),
        "json": spark.readStream.schema("key string, id long").json(f"{folder}/json"),
    }
    for name, frame in frames.items():
        mapped = frame.repartition("key").mapInArrow(_same, frame.schema)
        query = (
            mapped.writeStream.foreachBatch(lambda batch, _: batch.toArrow())
            .option("checkpointLocation", f"{folder}/checkpoint-{name}")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()


def _same(batches: Iterable[Any]) -> Iterable[Any]:
    return batches


def _end(gateway: JavaGateway) -> None:
    """End a JVM by closing its standard input, and wait until it has written its archive."""
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=240)


if __name__ == "__main__":
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    install(SPARK_HOME, SPARK_SETTINGS)
    archive(CLASSES)
    print(f"{CLASSES.stat().st_size >> 20} MiB of classes in {CLASSES.relative_to(ROOT)}")
