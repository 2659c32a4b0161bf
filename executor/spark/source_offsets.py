"""
Where a micro-batch ends in its source, as Spark has noted it before it began.

It is what Spark writes into ``offsets/<batch>`` of the query's checkpoint: the offsets of all sources of the query, the
watermark, and settings. With it a query can go on from a batch without the checkpoint that it had.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["end_offsets", "query_of"]

_LOG = logging.getLogger("millpond")
_QUERY_ID = "sql.streaming.queryId"


def query_of(frame: DataFrame, stream: str) -> str:
    """
    The id of the streaming query whose batch this is.

    Args:
        frame: the batch.
        stream: the injected stream that it is for.

    Raises:
        InvalidError: it is no batch of a query.
    """
    context: Any = frame.sparkSession._jsparkSession.sparkContext()  # noqa: SLF001
    query = context.getLocalProperty(_QUERY_ID)
    if query is None:
        raise InvalidError("this function runs only as the foreachBatch of a streaming query", input=stream)
    return str(query)


def end_offsets(frame: DataFrame, query: str, batch: int) -> str | None:
    """
    The entry of Spark's offset log for a batch; ``None`` where Spark does not tell it.

    Args:
        frame: the batch.
        query: the id of its query.
        batch: its number.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    session = frame.sparkSession
    try:
        # Spark has no public way from a batch to its offsets; its progress reports come after the batch.
        gateway: Any = session._jvm  # noqa: SLF001
        running = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
        log = running.get(gateway.java.util.UUID.fromString(query)).offsetLog()
        written = gateway.java.io.ByteArrayOutputStream()
        log.serialize(log.get(batch).get(), written)
        return str(written.toString("UTF-8"))
    except (Py4JError, AttributeError, TypeError) as error:
        _LOG.info("spark does not tell the offsets of batch %s: %s", batch, error)
        return None
