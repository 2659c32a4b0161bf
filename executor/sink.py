"""
Sinks: streams on their way out of Millpond, exactly once (MillWheel §6.1, architecture §6).

A runner hands a sink each committed superstep's productions, in order, and after a crash the
last superstep again. The sink stores the superstep's number in the same commit as the data, so
what it already has it skips. Nothing that has not been committed ever reaches a sink.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable
from urllib.parse import quote

import pyarrow as pa

from millpond.statestore.types import Superstep

__all__ = ["Sink", "SinkWriter", "sink_app_id"]


class SinkWriter(Protocol):
    """
    The running side of a sink; used by one thread at a time.
    """

    @property
    def delivered(self) -> Superstep:
        """
        The last superstep that the sink has; 0 when it has none.
        """
        ...

    def write(self, superstep: Superstep, productions: pa.Table) -> None:
        """
        Deliver a superstep's productions, unless the sink has them already.

        Args:
            superstep: the superstep that produced them, already committed.
            productions: columns ``key``, ``at``, ``value`` (JSON text) and ``value_bytes``.

        Raises:
            InvalidError: the records do not fit the sink.
            UnavailableError: the sink is away; the same call may be made again.
        """
        ...


@runtime_checkable
class Sink(Protocol):
    """
    Where a stream goes: configuration without state.
    """

    @property
    def identity(self) -> str:
        """
        The place that is written to; two sinks of one pipeline must not share it.
        """
        ...

    def open(self, store_id: str, pipeline: str, name: str) -> SinkWriter:
        """
        Make the running side for one sink of one pipeline of one store.
        """
        ...


def sink_app_id(store_id: str, pipeline: str, name: str) -> str:
    """
    The Delta application id under which a sink remembers the last superstep it has.

    Example:
        >>> sink_app_id("51d0", "zeitgeist", "spikes")
        'millpond/sink/51d0/zeitgeist/spikes'
    """
    return f"millpond/sink/{quote(store_id, safe='')}/{quote(pipeline, safe='')}/{quote(name, safe='')}"
