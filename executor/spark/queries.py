"""The streaming queries that feed a run on Spark.

Two drivers that start a pipeline at the same moment write one checkpoint, and Spark lets either of them fail, even the
owner of the pipeline. So only the owner starts a query, and it restarts the query after a conflict. The other driver is
fenced: it writes at most one batch before its next commit is refused.

The end of a batch is the entry that Spark writes into ``offsets/<batch>`` of the query's checkpoint before the batch
begins: the offsets of all sources of the query, the watermark, and settings. With the entry a query can continue from
a batch without its former checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final, TypeAlias
from urllib.parse import unquote, urlsplit

import orjson
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from millpond.executor.spark.session import spark_calls
from millpond.statestore.errors import ConflictError, InvalidError, MillpondError, QueryStoppedError
from millpond.statestore.types import Objects

StartQuery: TypeAlias = "Callable[[], StreamingQuery]"
"""Starts a query, each time on the same checkpoint."""

_STARTS_MAX: Final = 5
"""Starts of a query in one run. A fenced driver disturbs it once or twice."""

_CONFLICTS: Final = (
    "CONCURRENT_STREAM_LOG_UPDATE",
    "CONCURRENT_QUERY",
    # The other query has begun a new checkpoint between two looks of this one.
    "STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY",
    "STREAMING_CHECKPOINT_MISSING_METADATA_FILE",
    # An error without a name.
    "Multiple streaming queries are concurrently using",
)
"""Parts of Spark's errors when another query writes the same checkpoint."""


@dataclass(slots=True)
class _Feed:
    stream: str
    start: StartQuery
    query: StreamingQuery = field(init=False)
    starts: int = 0


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
            feed = _Feed(stream, start)
            self._start(feed)
            self._feeds.append(feed)

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
            if not self._may_start_again(error):
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
                self._start(feed, error)
            return True

    def _may_start_again(self, error: Exception) -> bool:
        is_conflict = _is_conflict(error)
        if not (is_conflict or self._is_stopped):
            # Because what two drivers write at once can fail in any way: the one that is fenced says so.
            self._check_owner()
        return is_conflict

    def _start(self, feed: _Feed, error: Exception | None = None) -> None:
        while feed.starts < _STARTS_MAX:
            # A fenced driver must not start a query: it would disturb the owner's.
            self._check_owner()
            feed.starts += 1
            try:
                with spark_calls():
                    feed.query = feed.start()
                    return
            except Exception as failure:
                if not self._may_start_again(failure):
                    raise
                error = failure
        raise ConflictError(
            "another query writes the checkpoint of this input, though this process holds the pipeline: stop it",
            input=feed.stream,
            reason=next(iter(str(error).splitlines()), ""),
        ) from error


def _is_conflict(error: Exception) -> bool:
    return any(name in str(error) for name in _CONFLICTS)


_LOG = logging.getLogger("millpond")
_QUERY_ID: Final = "sql.streaming.queryId"
_RUN_ID: Final = "spark.jobGroup.id"
"""Spark cancels the jobs of a query by this group, which it names after the start of the query."""

_ENDING: Final = ("AvailableNow", "OneTime")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStart:
    """A start of a streaming query: the query's id, which its checkpoint keeps, and the id of this start."""

    query: str
    start: str

    @classmethod
    def of(cls, frame: DataFrame, stream: str) -> QueryStart:
        context: Any = frame.sparkSession._jsparkSession.sparkContext()  # noqa: SLF001
        query = context.getLocalProperty(_QUERY_ID)
        if query is None:
            raise InvalidError(
                "this function runs only as the foreachBatch of a streaming query: give it to writeStream.foreachBatch, "
                "and a bounded frame to SparkRunner.run",
                input=stream,
            )
        return cls(query=str(query), start=str(context.getLocalProperty(_RUN_ID)))

    def end_offsets(self, frame: DataFrame, batch: int) -> str | None:
        """Return the entry of Spark's offset log for a batch, if Spark gives it."""
        try:
            # Spark has no public API from a batch to its offsets; its progress reports come after the batch.
            log = _running(frame, self.query).offsetLog()
            gateway: Any = frame.sparkSession._jvm  # noqa: SLF001
            written = gateway.java.io.ByteArrayOutputStream()
            log.serialize(log.get(batch).get(), written)
            return str(written.toString("UTF-8"))
        except _untold() as error:
            _LOG.info("spark does not tell the offsets of batch %s: %s", batch, error)
            return None

    def check_end(self, frame: DataFrame, stream: str, batch: int, entry: str) -> None:
        """Raise if the checkpoint's end of the last batch in the store is not the end that the store has recorded.

        An object store does not keep a fenced driver from writing over the owner's entry.
        """
        found = self.end_offsets(frame, batch)
        if found is not None and _sources_in(found) != _sources_in(entry):
            raise InvalidError(
                "the checkpoint says that this batch ended elsewhere than the batch that the store consumed, as after two "
                "drivers that wrote it at once, so records would be lost or repeated: `millpond rewind` to a version before "
                "the batch has Spark plan it again",
                input=stream,
                checkpoint=self.query,
                batch=batch,
                ends_at=_sources_in(found),
                store_ends_at=_sources_in(entry),
            )

    def ends_by_itself(self, frame: DataFrame) -> bool:
        """Return True if the query ends once it has read the data of its start, as with ``availableNow``."""
        try:
            return str(_running(frame, self.query).trigger().toString()).startswith(_ENDING)
        except _untold() as error:
            _LOG.info("spark does not tell the trigger of a query: %s", error)
            return False

    def check_running(self, frame: DataFrame, stream: str) -> None:
        """Raise `QueryStoppedError` if the query is being stopped, because Spark cancels the jobs of its batch."""
        refuse_stopped(frame, self.query, stream)


def refuse_changed_files(stream: str, checkpoint: Objects) -> None:
    """Refuse a checkpoint that has read files of this machine which have changed since; Spark would not read them again."""
    read = defaultdict[str, set[int]](set)
    for path, changed_ms in _files_read(checkpoint):
        read[path].add(changed_ms)
    changed = sorted(path for path, times in read.items() if _changed_ms(path) not in {None, *times})
    if changed:
        raise InvalidError(
            "files that were consumed have changed since, and Spark reads each file only once, so what is new in them would be "
            "left out: give new rows in files of other names; where the rows are the same, set back the file's time of change "
            "(touch -d); or begin with a new store",
            input=stream,
            files=len(changed),
            first=changed[0],
        )


def _files_read(checkpoint: Objects) -> Iterator[tuple[str, int]]:
    """Yield the local files that file sources have read, each with its time of change."""
    for name in checkpoint.list("sources"):
        if not PurePath(name).name.removesuffix(".compact").isdecimal():
            continue
        for line in checkpoint.get(name).splitlines()[1:]:
            # Other sources write other lines.
            with suppress(ValueError, TypeError, KeyError):
                entry = orjson.loads(line)
                place, changed_ms = urlsplit(entry["path"]), int(entry["timestamp"])
                if place.scheme == "file":
                    yield unquote(place.path), changed_ms


def _changed_ms(path: str) -> int | None:
    try:
        return Path(path).stat().st_mtime_ns // 1_000_000
    except OSError:
        return None


def _sources_in(entry: str) -> list[str]:
    """Return the offsets of the sources, which follow a line about the format and one about the batch."""
    return [line.strip() for line in entry.splitlines()[2:]]


@contextmanager
def unless_stopped(frame: DataFrame, query: str, stream: str) -> Iterator[None]:
    """Raise `QueryStoppedError` in place of Spark's errors if the batch's query is being stopped."""
    try:
        yield
    except MillpondError:
        raise
    except Exception as failure:
        if not _is_being_stopped(frame, query):
            raise
        raise _stopped(stream) from failure


def refuse_stopped(frame: DataFrame, query: str, stream: str) -> None:
    """Raise `QueryStoppedError` if a query is being stopped in the middle of a batch."""
    if _is_being_stopped(frame, query):
        raise _stopped(stream)


def _stopped(stream: str) -> QueryStoppedError:
    return QueryStoppedError(
        "the query was stopped in the middle of a batch, which it brings again once it is started again",
        input=stream,
    )


def _is_being_stopped(frame: DataFrame, query: str) -> bool:
    try:
        return not _running(frame, query).isActive()
    except _untold() as error:
        _LOG.info("spark does not tell the state of a query: %s", error)
        return False


def _running(frame: DataFrame, query: str) -> Any:
    """Return Spark's own object of a query that has a batch under way."""
    session: Any = frame.sparkSession
    running = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return running.get(session._jvm.java.util.UUID.fromString(query))  # noqa: SLF001


def _untold() -> tuple[type[Exception], ...]:
    """Return the errors of Spark's own objects, which are not a public interface and whose JVM may have ended."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    return (Py4JError, PySparkException, AttributeError, TypeError, OSError)
