"""
Names of Delta ``txn`` actions: what a store remembers of owners, inputs, time and counts.

A ``txn`` outlives log cleanup and checkpoints, moves in the same commit as the rows, and every Delta
reader sees it; so whatever a restart must know is one. All of them only ever rise. Each is named
``millpond/<kind>/<part>/…`` with its parts quoted.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote, unquote

__all__ = [
    "CLAIM_PREFIX",
    "COUNT_PREFIX",
    "INPUT_PREFIX",
    "INTERVAL_PREFIX",
    "SAVEPOINT_PREFIX",
    "SUPERSTEP_PREFIX",
    "TOTAL_PREFIX",
    "WATERMARK_PREFIX",
    "app_id_parts",
    "bare_ids_app_id",
    "claim_app_id",
    "count_app_id",
    "input_app_id",
    "member_status_app_id",
    "savepoint_app_id",
    "sink_app_id",
    "superstep_app_id",
    "total_app_id",
    "watermark_app_id",
]

INTERVAL_PREFIX: Final = "millpond/interval/"
"""Of fences: the version packs an interval's sequencer and commit number."""

INPUT_PREFIX: Final = "millpond/input/"
"""Of outside sources: the version is the last batch consumed; below 0 a repair took it back."""

SUPERSTEP_PREFIX: Final = "millpond/superstep/"
"""Of pipelines: the version is the last superstep committed."""

SAVEPOINT_PREFIX: Final = "millpond/savepoint/"
"""Of savepoints: the version is the table version that one keeps readable."""

WATERMARK_PREFIX: Final = "millpond/watermark/"
"""Of journaled watermarks, in microseconds."""

TOTAL_PREFIX: Final = "millpond/total/"
"""Of counts over a pipeline's whole life."""

COUNT_PREFIX: Final = "millpond/count/"
"""Of counts by computation."""

CLAIM_PREFIX: Final = "millpond/claim/"
"""Of claims: the version is the number of the pipeline that a computation belongs to."""

_BARE_IDS_PREFIX: Final = "millpond/bare_ids/"
_MEMBER_STATUS_PREFIX: Final = "millpond/standing/"
_SINK_PREFIX: Final = "millpond/sink/"


def _quoted(*parts: str) -> str:
    return "/".join(quote(part, safe="") for part in parts)


def app_id_parts(app_id: str, prefix: str) -> tuple[str, ...]:
    """
    The parts of an application id after its prefix, unquoted.

    Example:
        >>> app_id_parts("millpond/input/zeitgeist/queries/bounded", INPUT_PREFIX)
        ('zeitgeist', 'queries', 'bounded')
    """
    return tuple(unquote(part) for part in app_id.removeprefix(prefix).split("/"))


def input_app_id(pipeline: str, stream: str, source: str) -> str:
    """
    Names an outside source's position: the last batch that one of a stream's sources had consumed.

    Example:
        >>> input_app_id("zeitgeist", "queries", "bounded")
        'millpond/input/zeitgeist/queries/bounded'
    """
    return INPUT_PREFIX + _quoted(pipeline, stream, source)


def superstep_app_id(pipeline: str) -> str:
    """
    Names a pipeline's last superstep.
    """
    return SUPERSTEP_PREFIX + _quoted(pipeline)


def savepoint_app_id(name: str) -> str:
    """
    Names a savepoint, whose table version outlives the catalog and the cleanup of the log.
    """
    return SAVEPOINT_PREFIX + _quoted(name)


def watermark_app_id(pipeline: str, kind: str, name: str) -> str:
    """
    Names a journaled low watermark; ``kind`` is ``injector`` or ``computation``.
    """
    return WATERMARK_PREFIX + _quoted(pipeline, kind, name)


def total_app_id(pipeline: str, counter: str) -> str:
    """
    Names a running total over the pipeline's whole life, such as ``records``.
    """
    return TOTAL_PREFIX + _quoted(pipeline, counter)


def count_app_id(pipeline: str, computation: str, counter: str) -> str:
    """
    Names a counter of one computation.
    """
    return COUNT_PREFIX + _quoted(pipeline, computation, counter)


def member_status_app_id(pipeline: str, stream: str, member: str) -> str:
    """
    Names what was declared of a stream's member, or of a stream without members (``""``).
    """
    return _MEMBER_STATUS_PREFIX + _quoted(pipeline, stream, member)


def claim_app_id(computation: str) -> str:
    """
    Names the claim of a pipeline on a computation.

    There is one a computation, so that of two pipelines that want the same one a single commit wins.
    """
    return CLAIM_PREFIX + _quoted(computation)


def bare_ids_app_id(computation: str) -> str:
    """
    Names the choice of the stream whose record ids a computation keeps as they came.

    The choice is made once, when the first stream with ids is consumed, and outlives changes of the
    pipeline: ids that are kept must be found again.
    """
    return _BARE_IDS_PREFIX + _quoted(computation)


def sink_app_id(store_id: str, pipeline: str, name: str) -> str:
    """
    Names, in a sink's own table, the last superstep that it has been given.

    Example:
        >>> sink_app_id("51d0", "zeitgeist", "spikes")
        'millpond/sink/51d0/zeitgeist/spikes'
    """
    return _SINK_PREFIX + _quoted(store_id, pipeline, name)
