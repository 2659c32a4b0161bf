"""Micro-batches: the streaming query of a batch, and its end in the source.

The end of a batch is the entry that Spark writes into ``offsets/<batch>`` of the query's checkpoint before the batch
begins: the offsets of all sources of the query, the watermark, and settings. With the entry a query can continue from
a batch without its former checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millpond.statestore.errors import InvalidError, MillpondError, QueryStoppedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
        """Return the start of a batch's query."""
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

    def ends_by_itself(self, frame: DataFrame) -> bool:
        """Return True if the query ends once it has read the data of its start, as with ``availableNow``."""
        try:
            return str(_running(frame, self.query).trigger().toString()).startswith(_ENDING)
        except _untold() as error:
            _LOG.info("spark does not tell the trigger of a query: %s", error)
            return False

    def check_running(self, frame: DataFrame, stream: str) -> None:
        """Raise `QueryStoppedError` if the query is being stopped, because Spark cancels the jobs of its batch."""
        if _is_being_stopped(frame, self.query):
            raise _stopped(stream)


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
