"""
Calls to Spark, whose JVM may have been killed: then they fail with one sentence instead of py4j's own errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from millpond.statestore.errors import MillpondError, UnavailableError

__all__ = ["spark_calls"]


@contextmanager
def spark_calls() -> Iterator[None]:
    """
    Let calls to Spark fail with an `UnavailableError` if its JVM has ended.

    Raises:
        UnavailableError: the JVM has ended; any other error is raised as it is.
    """
    try:
        yield
    except MillpondError:
        raise
    except Exception as error:
        # What py4j raises differs from call to call, so the JVM itself is asked.
        if not _has_ended():
            raise
        raise UnavailableError(
            "spark's jvm has ended (killed, or out of memory): start the program again, it goes on from the last commit"
        ) from error


def _has_ended() -> bool:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark import SparkContext

    # Spark has no public name for it, and a stopped context has none at all.
    gateway = SparkContext._gateway  # noqa: SLF001
    if gateway is None:
        return False
    try:
        gateway.jvm.System.nanoTime()
    except (Py4JError, OSError):
        return True
    return False
