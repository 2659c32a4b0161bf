"""The streaming queries that feed a run on Spark.

Two drivers that start a pipeline at the same moment write one checkpoint, and Spark lets either of them fail: also
the one that holds the pipeline. So a query is started only by the pipeline's owner, and the owner starts it again if
the other driver came in between. The other one is fenced: it writes one batch at most before its next commit is
refused.
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
"""So often a query is started in one run; a driver that has been fenced disturbs it once or twice."""

_CONFLICTS: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "CONCURRENT_QUERY",
    "SparkConcurrentModificationException",
)
"""What Spark's errors say when another query writes the same checkpoint."""


@dataclass(slots=True)
class _Feed:
    """One stream's query, and how to start it again."""

    stream: str
    start: StartQuery
    query: StreamingQuery
    starts: int = 1


class Queries:
    """Starts the queries of one run and watches them; any thread may use it.

    Args:
        check_owner: raises a `FencedError` if another process has taken the pipeline.
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
        """The streams that the queries read."""
        return tuple(feed.stream for feed in self._feeds)

    @property
    def are_active(self) -> bool:
        """Whether all of them run.

        Raises:
            UnavailableError: Spark's JVM has ended.
        """
        with spark_calls():
            return all(query.isActive for query in self)

    def start(self, stream: str, start: StartQuery) -> None:
        """Start the query of a stream, as the owner of the pipeline.

        Raises:
            FencedError: another process has taken the pipeline; nothing was started.
            ConflictError: another query keeps writing the checkpoint.
            UnavailableError: Spark's JVM has ended.
        """
        with self._lock:
            started, starts = self._start(stream, start, 0)
            self._feeds.append(_Feed(stream, start, started, starts))

    def await_all(self, is_over: Callable[[], bool]) -> bool:
        """Wait until every query has ended by itself.

        Args:
            is_over: asked each second whether to stop waiting.

        Returns:
            Whether all have ended.

        Raises:
            FencedError: another process has taken the pipeline.
            UnavailableError: Spark's JVM has ended.
            Exception: what ended a query, as Spark tells it.
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
        """Start each query again that another driver has ended by writing its checkpoint.

        Raises:
            FencedError: another process has taken the pipeline.
            ConflictError: another query keeps writing the checkpoint.
            UnavailableError: Spark's JVM has ended.
        """
        for feed in list(self._feeds):
            query = feed.query
            with spark_calls():
                error = None if query.isActive else query.exception()
            if error is not None and _is_conflict(error):
                self._start_again(feed, query, error)

    def stop_others(self, streams: Container[str]) -> None:
        """Stop the queries of all streams but these, and watch them no more.

        Raises:
            UnavailableError: Spark's JVM has ended, and the queries with it.
        """
        with self._lock:
            others = [feed for feed in self._feeds if feed.stream not in streams]
            self._feeds = [feed for feed in self._feeds if feed.stream in streams]
        for feed in others:
            with spark_calls():
                feed.query.stop()

    def stop(self) -> None:
        """Stop all of them; what they have under way is repeated by the next run.

        Raises:
            UnavailableError: Spark's JVM has ended, and the queries with it.
        """
        with self._lock:
            self._is_stopped = True
        for query in self:
            with spark_calls():
                query.stop()

    def _start_again(self, feed: _Feed, failed: StreamingQuery, error: Exception) -> bool:
        """Start a query again unless another thread has; return whether it runs, so is not to be stopped."""
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
