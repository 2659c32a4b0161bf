"""The download of Delta's jars ahead of the first Spark session.

Spark resolves ``spark.jars.packages`` with Ivy into the user's cache when its JVM starts, even without a session: that
takes up to a minute the first time, and about three seconds when the jars are in the cache.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from delta import configure_spark_with_delta_pip
from pyspark.conf import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from millpond.executor.spark.delta_jars import check_jars, files_in, write_pins
from millpond.statestore.errors import MillpondError, UnavailableError

_PACKAGES = "spark.jars.packages"
_REPORT_LINES_MAX = 40


def fetch() -> tuple[str, list[Path]]:
    """Resolve Delta's jars into Ivy's cache, and return the Maven coordinates of the packages, and the jars.

    An error has the end of Ivy's report as a note.
    """
    builder = configure_spark_with_delta_pip(SparkSession.builder)
    packages = str(builder._options[_PACKAGES])  # noqa: SLF001 - the builder has no public reader
    conf = SparkConf(loadDefaults=False).set(_PACKAGES, packages)
    with tempfile.TemporaryFile() as report:
        try:
            gateway = launch_gateway(conf, {"stdout": report, "stderr": report})  # type: ignore[no-untyped-call]
        except PySparkRuntimeError as error:
            unavailable = UnavailableError("cannot fetch delta's jars", packages=packages)
            report.seek(0)
            lines = report.read().decode(errors="replace").splitlines()
            unavailable.add_note("\n".join(lines[-_REPORT_LINES_MAX:]))
            raise unavailable from error
        jars = files_in(str(gateway.jvm.System.getProperty("spark.jars")))
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends with its standard input
        gateway.proc.wait(timeout=60)
    return packages, jars


def main() -> int:
    print("Fetching Delta Lake's jars for Spark (once; up to a minute) …", flush=True)
    try:
        packages, jars = fetch()
        if "--pin" in sys.argv:
            write_pins(jars)
        check_jars(jars, all_pinned=True)
    except MillpondError as error:
        print("\n".join([*getattr(error, "__notes__", ()), f"error: {error}"]), file=sys.stderr)
        return 1
    print(f"Delta Lake's jars are there, with the pinned checksums: {packages}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
