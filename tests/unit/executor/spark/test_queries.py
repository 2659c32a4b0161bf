"""The queries of a run on Spark, with queries that only pretend: who starts them, and who starts them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from millpond.executor.spark.queries import Queries
from millpond.statestore.errors import ConflictError, FencedError


class SparkError(Exception):
    """An error as Spark tells it."""


CONFLICT = SparkError(
    "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple jobs detected for 4."
)
METADATA = SparkError(
    "org.apache.spark.SparkConcurrentModificationException: Multiple streaming queries are …"
)
OTHER = SparkError("[STREAM_FAILED] the folder is gone")


class Query:
    """A query that has ended, by itself or with an error."""

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
    """Starts with these outcomes, one after the other; the last one stays."""
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


def test_the_owner_starts_a_query_again_that_another_driver_has_disturbed() -> None:
    """Whether Spark refuses to start it, or ends it later, for the checkpoint is written by two."""
    queries = Queries(own)
    queries.start("s", starting(METADATA, Query(CONFLICT), METADATA, Query(None)))

    assert queries.await_all(lambda: False)
    assert [query.exception() for query in queries] == [None]


def test_a_query_that_no_caller_awaits_is_started_again_too() -> None:
    """A run that is only asked whether it is active has its queries revived by its ticker."""
    queries = Queries(own)
    queries.start("s", starting(Query(CONFLICT), Query(None)))
    queries.revive()

    assert [query.exception() for query in queries] == [None]


def test_who_is_not_the_owner_starts_nothing() -> None:
    """Before the start, and when Spark has told of the other driver, the answer is FencedError."""
    started = starting(Query(CONFLICT), Query(None))
    with pytest.raises(FencedError):
        Queries(taken).start("s", started)

    answers = iter([own, taken])

    def check() -> None:
        next(answers)()

    queries = Queries(check)
    queries.start("s", started)
    with pytest.raises(FencedError):
        queries.await_all(lambda: False)


def test_an_owner_that_is_disturbed_again_and_again_gives_up() -> None:
    """After five starts it is an error of its own, which says what to stop and has Spark's as its cause."""
    queries = Queries(own)
    with pytest.raises(ConflictError, match=r"another query writes the checkpoint.*input=`s`") as raised:
        queries.start("s", starting(*[METADATA] * 5, Query(None)))
    assert raised.value.__cause__ is METADATA


def test_other_errors_of_spark_are_raised_as_they_are() -> None:
    """Only what two drivers do to each other is mended."""
    queries = Queries(own)
    queries.start("s", starting(Query(OTHER), Query(None)))
    with pytest.raises(SparkError, match="the folder is gone"):
        queries.await_all(lambda: False)
    with pytest.raises(SparkError, match="the folder is gone"):
        queries.start("t", starting(OTHER, Query(None)))


def test_stopped_queries_are_not_started_again() -> None:
    """After stop a query that another driver disturbs stays as it is, and waiting for it is over."""
    query = Query(CONFLICT)
    queries = Queries(own)
    queries.start("s", starting(query, Query(None)))
    queries.stop()
    queries.revive()

    assert query.is_stopped
    assert queries.await_all(lambda: False)
    assert list(queries) == [query]
