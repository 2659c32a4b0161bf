"""The download of the jars of Delta, and with ``--s3`` of Hadoop's S3A, ahead of the first Spark session.

Spark resolves ``spark.jars.packages`` with Ivy into the user's cache when its JVM starts, even without a session: that
takes up to a minute the first time, and about three seconds when the jars are in the cache. The standard output has the
options with which ``spark-submit``, which starts the JVM itself, resolves the same jars.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pyspark.conf import SparkConf
from pyspark.errors import PySparkRuntimeError
from pyspark.java_gateway import launch_gateway

from millpond.executor.spark.jars import check_jars, files_in, write_pins
from millpond.executor.spark.session import session_builder
from millpond.statestore.errors import MillpondError, UnavailableError

_PACKAGES = "spark.jars.packages"
_EXCLUDES = "spark.jars.excludes"
_REPORT_LINES_MAX = 40


def fetch(*, for_s3: bool) -> tuple[dict[str, str], list[Path]]:
    """Resolve jars into Ivy's cache, and return Spark's settings for them, and the jars.

    An error has the end of Ivy's report as a note.
    """
    builder = session_builder("jars", "local", {}, has_delta=False, for_s3=for_s3)
    options: dict[str, str] = builder._options  # noqa: SLF001 - the builder has no public reader
    settings = {name: options[name] for name in (_PACKAGES, _EXCLUDES) if name in options}
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with tempfile.TemporaryFile() as report:
        try:
            gateway = launch_gateway(conf, {"stdout": report, "stderr": report})  # type: ignore[no-untyped-call]
        except PySparkRuntimeError as error:
            unavailable = UnavailableError("cannot fetch spark's jars", packages=settings[_PACKAGES])
            report.seek(0)
            lines = report.read().decode(errors="replace").splitlines()
            unavailable.add_note("\n".join(lines[-_REPORT_LINES_MAX:]))
            raise unavailable from error
        jars = files_in(str(gateway.jvm.System.getProperty("spark.jars")))
        gateway.shutdown()
        gateway.proc.stdin.close()  # the JVM ends with its standard input
        gateway.proc.wait(timeout=60)
    return settings, jars


def main() -> int:
    print("Fetching jars for Spark (once; up to a minute) …", file=sys.stderr)
    try:
        settings, jars = fetch(for_s3="--s3" in sys.argv)
        if "--pin" in sys.argv:
            write_pins(jars)
        check_jars(jars, all_pinned=True)
    except MillpondError as error:
        print("\n".join([*getattr(error, "__notes__", ()), f"error: {error}"]), file=sys.stderr)
        return 1
    print(
        "The jars are there, with the pinned checksums. Options of spark-submit for the same:",
        file=sys.stderr,
    )
    for name, value in settings.items():
        print(f"--conf {name}={value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
