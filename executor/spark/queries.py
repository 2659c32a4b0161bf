"""The streaming queries that feed a run on Spark.

Two drivers that start a pipeline at the same moment write one checkpoint, and Spark lets either of them fail, even the
owner of the pipeline. So only the owner starts a query, and it restarts the query after a conflict. The other driver is
fenced: it writes at most one batch before its next commit is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from millpond.executor.spark.session import spark_calls
from millpond.statestore.errors import ConflictError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

StartQuery: TypeAlias = "Callable[[], StreamingQuery]"
"""Starts a query, each time on the same checkpoint."""

_STARTS_MAX: Final = 5
"""Starts of a query in one run. A fenced driver disturbs it once or twice."""

_CONFLICTS: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "CONCURRENT_QUERY",
    "SparkConcurrentModificationException",
)
"""Names in Spark's errors when another query writes the same checkpoint."""


@dataclass(slots=True)
class _Feed:
    stream: str
    start: StartQuery
    query: StreamingQuery
    starts: int = 1


class Queries:
    """Starts the queries of one run and watches them, from any thread.

    ``check_owner`` raises a `FencedError` if another process has taken the pipeline.
    """

    def __init__(self, check_owner: Callable[[], None]) -> None:
        self._check_owner = check_owner
        self._lock = threading.RLock()
        self._feeds: list[_Feed] = []
        self._is_stopped = False

    def __iter__(self) -> Iterator[StreamingQuery]:
        return iter([feed.query for feed in self._feeds])

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(feed.stream for feed in self._feeds)

    @property
    def are_active(self) -> bool:
        with spark_calls():
            return all(query.isActive for query in self)

    def start(self, stream: str, start: StartQuery) -> None:
        with self._lock:
            started, starts = self._start(stream, start, 0)
            self._feeds.append(_Feed(stream, start, started, starts))

    def await_all(self, is_over: Callable[[], bool]) -> bool:
        """Return True once every query has ended by itself, False once ``is_over``, called each second, returns True.

        The error that ended a query is raised.
        """
        for feed in list(self._feeds):
            while not self._await(feed):
                if is_over():
                    return False
        return True

    def _await(self, feed: _Feed) -> bool:
        query = feed.query
        try:
            with spark_calls():
                return bool(query.awaitTermination(1))
        except Exception as error:
            if feed not in self._feeds:
                return True  # an update has removed its stream
            if not _is_conflict(error):
                raise
            return not self._start_again(feed, query, error)

    def revive(self) -> None:
        """Restart each query that another driver has ended by writing its checkpoint."""
        for feed in list(self._feeds):
            query = feed.query
            with spark_calls():
                error = None if query.isActive else query.exception()
            if error is not None and _is_conflict(error):
                self._start_again(feed, query, error)

    def stop_others(self, streams: Container[str]) -> None:
        """Stop and drop the queries of all streams but these."""
        with self._lock:
            others = [feed for feed in self._feeds if feed.stream not in streams]
            self._feeds = [feed for feed in self._feeds if feed.stream in streams]
        for feed in others:
            with spark_calls():
                feed.query.stop()

    def stop(self) -> None:
        """Stop all queries. The next run repeats their current batches."""
        with self._lock:
            self._is_stopped = True
        for query in self:
            with spark_calls():
                query.stop()

    def _start_again(self, feed: _Feed, failed: StreamingQuery, error: Exception) -> bool:
        """Restart a query unless another thread has, and return False if the queries are being stopped."""
        with self._lock:
            if self._is_stopped:
                return False
            if feed.query is failed:
                feed.query, feed.starts = self._start(feed.stream, feed.start, feed.starts, error)
            return True

    def _start(
        self, stream: str, start: StartQuery, starts: int, error: Exception | None = None
    ) -> tuple[StreamingQuery, int]:
        while starts < _STARTS_MAX:
            # A fenced driver must not start a query: it would disturb the owner's.
            self._check_owner()
            starts += 1
            try:
                with spark_calls():
                    return start(), starts
            except Exception as failure:
                if not _is_conflict(failure):
                    raise
                error = failure
        raise ConflictError(
            "another query writes the checkpoint of this input, though this process holds the pipeline: stop it",
            input=stream,
        ) from error


def _is_conflict(error: Exception) -> bool:
    return any(name in str(error) for name in _CONFLICTS)
