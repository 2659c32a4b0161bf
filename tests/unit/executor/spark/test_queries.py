"""The queries of a Spark run, with fake queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from millpond.executor.spark.queries import Queries
from millpond.statestore.errors import ConflictError, FencedError


class SparkError(Exception):
    """An error with a message of Spark's."""


CONFLICT = SparkError(
    "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple jobs detected for 4."
)
METADATA = SparkError(
    "[STREAM_FAILED] Multiple streaming queries are concurrently using file:/pond/sources/0."
)
OTHER = SparkError("[STREAM_FAILED] the folder is gone")


class Query:
    """A query that has ended, with or without an error."""

    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.is_stopped = False

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802 - Spark's name
        if self._error is not None:
            raise self._error
        return True

    def exception(self) -> Exception | None:
        return self._error

    def stop(self) -> None:
        self.is_stopped = True


def starting(*outcomes: Exception | Query) -> Callable[[], Query]:
    """Make a function that starts with these outcomes in turn."""
    left: Iterator[Exception | Query] = iter(outcomes)

    def start() -> Query:
        outcome = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return start


def own() -> None:
    """The pipeline is this process's own."""


def taken() -> None:
    """Another process has taken it."""
    raise FencedError("another process has taken the pipeline")


def once_own() -> Callable[[], None]:
    """Another process takes it after the first check."""
    answers = iter([own, taken])

    def check() -> None:
        next(answers)()

    return check


def test_owner_restarts_a_query_after_a_checkpoint_conflict() -> None:
    """Another driver writes the checkpoint, so Spark refuses the start or ends the query later."""
    queries = Queries(own)
    queries.start("s", starting(METADATA, Query(CONFLICT), METADATA, Query(None)))

    assert queries.await_all(lambda: False)
    assert [query.exception() for query in queries] == [None]


def test_revive_restarts_a_query_that_no_caller_awaits() -> None:
    """The run's ticker calls it."""
    queries = Queries(own)
    queries.start("s", starting(Query(CONFLICT), Query(None)))
    queries.revive()

    assert [query.exception() for query in queries] == [None]


def test_former_owner_does_not_start_or_restart_a_query() -> None:
    started = starting(Query(CONFLICT), Query(None))
    with pytest.raises(FencedError):
        Queries(taken).start("s", started)

    queries = Queries(once_own())
    queries.start("s", started)
    with pytest.raises(FencedError):
        queries.await_all(lambda: False)


def test_owner_gives_up_after_five_checkpoint_conflicts() -> None:
    """The error advises stopping the other query."""
    queries = Queries(own)
    with pytest.raises(ConflictError, match=r"another query writes the checkpoint.*input=`s`") as raised:
        queries.start("s", starting(*[METADATA] * 5, Query(None)))
    assert raised.value.__cause__ is METADATA


def test_other_spark_errors_are_not_retried() -> None:
    queries = Queries(own)
    queries.start("s", starting(Query(OTHER), Query(None)))
    with pytest.raises(SparkError, match="the folder is gone"):
        queries.await_all(lambda: False)
    with pytest.raises(SparkError, match="the folder is gone"):
        queries.start("t", starting(OTHER, Query(None)))


def test_former_owner_says_that_it_is_fenced_whatever_its_query_failed_with() -> None:
    queries = Queries(once_own())
    queries.start("s", starting(Query(OTHER)))
    with pytest.raises(FencedError) as raised:
        queries.await_all(lambda: False)
    assert raised.value.__context__ is OTHER
    with pytest.raises(FencedError):
        Queries(once_own()).start("s", starting(OTHER))


def test_stopped_queries_are_not_started_again() -> None:
    query = Query(CONFLICT)
    queries = Queries(own)
    queries.start("s", starting(query, Query(None)))
    queries.stop()
    queries.revive()

    assert query.is_stopped
    assert queries.await_all(lambda: False)
    assert list(queries) == [query]
