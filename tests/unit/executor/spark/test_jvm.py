"""Errors of Spark's workers, read from Spark's traces."""

from __future__ import annotations

import pytest

from millpond.executor.spark.session import worker_calls
from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError

TRACE = """\
An error occurred while calling o90.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times
  File "/opt/python/lib/task.py", line 9, in run
{line}
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:588)
"""


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (
            "millpond.statestore.errors.UnavailableError: the object store failed path=`a`",
            UnavailableError,
            "^the object store failed path=`a`$",
        ),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.9",
            InvalidError,
            "set PYSPARK_PYTHON .*has different version: 3.9",
        ),
        ("ModuleNotFoundError: No module named 'pyarrow'", InvalidError, "set PYSPARK_PYTHON .*'pyarrow'"),
        ('java.io.IOException: Cannot run program "py3": error=2', InvalidError, 'PYSPARK_PYTHON .*"py3"'),
    ],
)
def test_last_line_of_a_workers_trace_is_raised(line: str, kind: type[MillpondError], words: str) -> None:
    """Spark's exception becomes the cause."""
    with pytest.raises(kind, match=words) as caught, worker_calls():
        raise RuntimeError(TRACE.format(line=line))

    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "line",
    [
        "ModuleNotFoundError: No module named 'rules'",
        "millpond.statestore.errors.ErrorKind: no class of errors",
        "ValueError: millpond.statestore.errors.DataError is a name",
    ],
)
def test_unknown_worker_errors_are_not_translated(line: str) -> None:
    """No advice is known for these, so Spark's own error is more useful."""
    with pytest.raises(RuntimeError), worker_calls():
        raise RuntimeError(TRACE.format(line=line))


def test_error_of_this_process_is_raised_unchanged() -> None:
    error = InvalidError("no such stream", stream="s")

    with pytest.raises(InvalidError) as caught, worker_calls():
        raise error

    assert caught.value is error
