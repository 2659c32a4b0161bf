"""What a worker of Spark failed with, out of the traces that Spark makes of it."""

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
def test_the_last_line_of_a_worker_is_the_error(line: str, kind: type[MillpondError], words: str) -> None:
    """It is raised in its class, with Spark's own as its cause."""
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
def test_other_errors_are_raised_as_they_are(line: str) -> None:
    """What says nothing that could be done stays Spark's."""
    with pytest.raises(RuntimeError), worker_calls():
        raise RuntimeError(TRACE.format(line=line))


def test_our_own_errors_pass() -> None:
    """Those that were raised in this process are not read once more."""
    error = InvalidError("no such stream", stream="s")

    with pytest.raises(InvalidError) as caught, worker_calls():
        raise error

    assert caught.value is error
