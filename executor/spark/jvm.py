"""Calls to Spark, whose JVM may have been killed, and whose Python workers may fail: they fail with one sentence instead
of py4j's own errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millpond.statestore import errors
from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError

_OURS: Final = re.compile(r"^(?:\S*: )?millpond\.statestore\.errors\.(\w+): (.+)$", re.MULTILINE)
"""The last line of a trace, as Spark repeats it of a worker."""

_OTHER_PYTHON: Final = (
    re.compile(r"PYTHON_VERSION_MISMATCH\]? *(?P<reason>.*)"),
    re.compile(r"(?P<reason>Cannot run program .*)"),
    re.compile(
        r"(?P<reason>ModuleNotFoundError: No module named '(?:millpond|pyspark|pyarrow|cloudpickle)\b.*)"
    ),
)
"""What Spark says where the workers' Python is not the driver's."""


@contextmanager
def spark_calls() -> Iterator[None]:
    """Let calls to Spark fail with an `UnavailableError` if its JVM has ended.

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


@contextmanager
def worker_calls() -> Iterator[None]:
    """Let a job of Spark fail with what its Python workers failed with.

    Raises:
        InvalidError: the workers run another Python than the driver, or one without Millpond.
        MillpondError: an error of Millpond's own ended a worker's task; any other error is raised as it is.
    """
    try:
        yield
    except MillpondError:
        raise
    except Exception as error:
        told = _told_by_worker(str(error))
        if told is None:
            raise
        raise told from error


def _told_by_worker(text: str) -> MillpondError | None:
    """The error that a worker's trace ends in, if it says what is to be done."""
    for pattern in _OTHER_PYTHON:
        if (found := pattern.search(text)) is not None:
            return InvalidError(
                "spark's workers run another python than the driver, or one without millpond: set PYSPARK_PYTHON to one "
                "of the driver's version with the same packages, on every machine, before the session begins",
                PYSPARK_PYTHON=os.environ.get("PYSPARK_PYTHON"),
                reason=found["reason"].strip(),
            )
    found = _OURS.search(text)
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, MillpondError)):
        return None
    return kind(found[2])


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
