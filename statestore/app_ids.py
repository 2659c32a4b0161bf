"""Names of Delta ``txn`` actions: a store's durable record of owners, inputs, time and counts.

A ``txn`` survives log cleanup and checkpoints, changes in the same commit as the rows, and is visible to
every Delta reader, so everything that a restart must know is stored as one. Versions only rise. Names
have the form ``millpond/<kind>/<part>/…`` with quoted parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from millpond.statestore.types import Superstep

INTERVAL_PREFIX: Final = "millpond/interval/"
"""Prefix of fences; the version packs an interval's sequencer and commit number."""

INPUT_PREFIX: Final = "millpond/input/"
"""Prefix of external sources; the version is the last batch consumed, below 0 after a repair undid it."""

INPUT_ROWS_PREFIX: Final = "millpond/input_rows/"
"""Prefix of bounded inputs; the version is how many of its rows count towards the watermark."""

INJECTED_PREFIX: Final = "millpond/injected/"
"""Prefix of streams that are injected by calls; the version is how many rows the store has taken."""

SUPERSTEP_PREFIX: Final = "millpond/superstep/"
"""Prefix of pipelines; the version is the last superstep committed."""

SAVEPOINT_PREFIX: Final = "millpond/savepoint/"
"""Prefix of savepoints; the version is the table version that the savepoint keeps readable."""

SAVEPOINT_RELEASED: Final = 2**63 - 1
"""The ``txn`` version of a dropped savepoint; no table version is as high."""

WATERMARK_PREFIX: Final = "millpond/watermark/"
"""Prefix of journaled watermarks; the version is event time in microseconds."""

TOTAL_PREFIX: Final = "millpond/total/"
"""Prefix of counts over a pipeline's whole life."""

COUNT_PREFIX: Final = "millpond/count/"
"""Prefix of counts per computation."""

CLAIM_PREFIX: Final = "millpond/claim/"
"""Prefix of claims; the version is the number of the pipeline that owns the computation."""

LOCATION_PREFIX: Final = "millpond/location/"
"""Prefix of places where the store has lain; the version is the table version that it was there at first."""

INCARNATION_PREFIX: Final = "millpond/incarnation/"
"""Prefix of incarnations after the first one; the version is the table version that each began at."""

FORK_PREFIX: Final = "millpond/fork/"
"""Prefix of the supersteps that an incarnation began with; the version is the pipeline's superstep."""

SINK_PREFIX: Final = "millpond/sink/"
"""Prefix, in sinks' own tables, of what was delivered; the version is the last superstep."""

CODEC_PREFIX: Final = "millpond/codec/"
"""Prefix of codecs, by computation and codec; the version is the table version that recorded it: the newest counts."""

PIPELINE_NAME_PREFIX: Final = "millpond/pipeline_name/"
"""Prefix of what pipelines are called, by their first name and the later one; the newest counts, as of codecs."""

STATE_VERSION_PREFIX: Final = "millpond/state_version/"
"""Prefix of versions of states, by computation and version; the newest counts, as of codecs."""

KEY_COLUMNS_PREFIX: Final = "millpond/key_columns/"
"""Prefix of the columns of typed keys, by computation and columns; the newest counts, as of codecs."""

STATE_COLUMNS_PREFIX: Final = "millpond/state_columns/"
"""Prefix of the columns that views show of states, by computation and columns; the newest counts, as of codecs."""

DECLARED_INTERVALS_PREFIX: Final = "millpond/declared_intervals/"
"""Prefix of declared numbers of intervals, by computation and number; the newest counts, as of codecs."""

BACKFILL_PREFIX: Final = "millpond/backfill/"
"""
Prefix of backfills, by pipeline, computation and stream; the version is twice the number of records consumed of it, and
one more once that is all of it. Below 0 a repair has undone it.
"""

CUT_PREFIX: Final = "millpond/cut/"
"""Prefix of cuts by hand; an even version asks for one, and the next odd one says that it is made."""

LETTERS_PREFIX: Final = "millpond/letters/"
"""Prefix of requests for dead letters; an even version asks, and the next odd one says that no letter is left."""

RESTORED_APP_ID: Final = "millpond/restored"
"""The version in which the table was last repaired or rewound."""

_BARE_IDS_PREFIX: Final = "millpond/bare_ids/"
_ID_SLACK_PREFIX: Final = "millpond/id_slack/"
_MEMBER_STATUS_PREFIX: Final = "millpond/standing/"


@lru_cache(maxsize=4_096)
def quoted(*parts: str) -> str:
    """The quoted parts of a name; each superstep asks for the same ones.

    Example:
        >>> quoted("page views", "a/b")
        'page%20views/a%2Fb'
    """
    return "/".join(quote(part, safe="") for part in parts)


def app_id_parts(app_id: str, prefix: str) -> tuple[str, ...]:
    """Split an application id, without its prefix, into unquoted parts.

    Example:
        >>> app_id_parts("millpond/input/zeitgeist/queries/bounded", INPUT_PREFIX)
        ('zeitgeist', 'queries', 'bounded')
    """
    return tuple(unquote(part) for part in app_id.removeprefix(prefix).split("/"))


def input_app_id(pipeline: str, stream: str, source: str) -> str:
    """Name an external source's position: the last batch consumed from one source of a stream.

    Example:
        >>> input_app_id("zeitgeist", "queries", "bounded")
        'millpond/input/zeitgeist/queries/bounded'
    """
    return INPUT_PREFIX + quoted(pipeline, stream, source)


def input_rows_app_id(pipeline: str, stream: str) -> str:
    """Name the number of rows of a bounded input that count towards its watermark."""
    return INPUT_ROWS_PREFIX + quoted(pipeline, stream)


def injected_app_id(pipeline: str, stream: str) -> str:
    """Name the number of rows that were injected into a stream by calls, over the pipeline's whole life."""
    return INJECTED_PREFIX + quoted(pipeline, stream)


def superstep_app_id(pipeline: str) -> str:
    """Name a pipeline's last superstep."""
    return SUPERSTEP_PREFIX + quoted(pipeline)


def savepoint_app_id(name: str) -> str:
    """Name a savepoint, whose table version survives the loss of the catalog and log cleanup."""
    return SAVEPOINT_PREFIX + quoted(name)


def savepoints_of(txns: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """The savepoints among the ``txn`` actions: name and table version (or `SAVEPOINT_RELEASED`).

    Example:
        >>> list(savepoints_of({"millpond/savepoint/before%20the%20sale": 4}))
        [('before the sale', 4)]
    """
    for app_id, version in txns.items():
        if app_id.startswith(SAVEPOINT_PREFIX):
            yield unquote(app_id.removeprefix(SAVEPOINT_PREFIX)), version


def supersteps_of(txns: Mapping[str, int]) -> dict[str, Superstep]:
    """The last superstep of each pipeline among the ``txn`` actions.

    Example:
        >>> supersteps_of({"millpond/superstep/daily%20clicks": 7})
        {'daily clicks': 7}
    """
    return {
        unquote(app_id.removeprefix(SUPERSTEP_PREFIX)): Superstep(superstep)
        for app_id, superstep in txns.items()
        if app_id.startswith(SUPERSTEP_PREFIX)
    }


def watermark_app_id(pipeline: str, kind: str, name: str) -> str:
    """Name a journaled low watermark; ``kind`` is ``injector`` or ``computation``."""
    return WATERMARK_PREFIX + quoted(pipeline, kind, name)


def total_app_id(pipeline: str, counter: str) -> str:
    """Name a running total over the pipeline's whole life, such as ``records``."""
    return TOTAL_PREFIX + quoted(pipeline, counter)


def count_app_id(pipeline: str, computation: str, counter: str) -> str:
    """Name a counter of one computation."""
    return COUNT_PREFIX + quoted(pipeline, computation, counter)


def member_status_app_id(pipeline: str, stream: str, member: str) -> str:
    """Name the declared status of a stream's member, or of a stream without members (``""``)."""
    return _MEMBER_STATUS_PREFIX + quoted(pipeline, stream, member)


def claim_app_id(computation: str) -> str:
    """Name the claim of a pipeline on a computation.

    Each computation has one claim, so when two pipelines want the same computation a single commit wins.
    """
    return CLAIM_PREFIX + quoted(computation)


def pipeline_number(pipeline: str) -> int:
    """A pipeline's name as a number that a Delta ``txn`` can hold."""
    return int.from_bytes(hashlib.sha256(pipeline.encode()).digest()[:8], "big") >> 1


def pipeline_name_app_id(stored: str, name: str) -> str:
    """Name what a pipeline is called that the store knows by the name ``stored``.

    Example:
        >>> pipeline_name_app_id("clicks", "visits")
        'millpond/pipeline_name/clicks/visits'
    """
    return PIPELINE_NAME_PREFIX + quoted(stored, name)


def codec_app_id(computation: str, codec: str) -> str:
    """Name the codec that encodes a computation's states.

    Example:
        >>> codec_app_id("counter", "json")
        'millpond/codec/counter/json'
    """
    return CODEC_PREFIX + quoted(computation, codec)


def recorded_word(positions: Mapping[str, int], prefix: str, computation: str) -> str | None:
    """The newest word that the table records of a computation; ``None`` if it records none.

    Example:
        >>> recorded_word({"millpond/codec/c/json": 3, "millpond/codec/c/bytes": 9}, "millpond/codec/", "c")
        'bytes'
    """
    words = {
        parts[1]: version
        for app_id, version in positions.items()
        # What a rewind has undone is below 0, for no position leaves the table.
        if version >= 0
        and app_id.startswith(prefix)
        and (parts := app_id_parts(app_id, prefix))[0] == computation
    }
    return max(words, key=words.__getitem__, default=None)


def key_columns_app_id(computation: str, columns: str) -> str:
    """Name the columns that a computation's typed keys are made of; see `millpond.statestore.rows.key_columns`."""
    return KEY_COLUMNS_PREFIX + quoted(computation, columns)


def state_columns_app_id(computation: str, columns: str) -> str:
    """Name the columns that views show of a computation's states; see `millpond.statestore.view_columns`."""
    return STATE_COLUMNS_PREFIX + quoted(computation, columns)


def state_version_app_id(computation: str, state_version: int) -> str:
    """Name the version of the states that a computation's code writes.

    Example:
        >>> state_version_app_id("counter", 3)
        'millpond/state_version/counter/3'
    """
    return STATE_VERSION_PREFIX + quoted(computation, str(state_version))


def declared_intervals_app_id(computation: str, intervals: int) -> str:
    """Name how many intervals a computation declared when its keys were cut; 0 if it left that to the runner."""
    return DECLARED_INTERVALS_PREFIX + quoted(computation, str(intervals))


def backfill_app_id(pipeline: str, computation: str, stream: str) -> str:
    """Name how much a computation has consumed of the history that it is given of a stream."""
    return BACKFILL_PREFIX + quoted(pipeline, computation, stream)


def cut_app_id(computation: str, kind: str, key: str) -> str:
    """Name a cut by hand of a computation's keys: ``split`` or ``merge``, in front of a key."""
    return CUT_PREFIX + quoted(computation, kind, key)


def letters_app_id(pipeline: str, action: str, selection: str) -> str:
    """Name a request for dead letters: what to do with which of a pipeline's letters."""
    return LETTERS_PREFIX + quoted(pipeline, action, selection)


def bare_ids_app_id(computation: str) -> str:
    """Name the choice of the stream whose record ids a computation stores unchanged.

    The choice is made once, when the first stream with ids is consumed, and survives changes to the
    pipeline: stored ids must still match those of later deliveries.
    """
    return _BARE_IDS_PREFIX + quoted(computation)


def id_slack_app_id(computation: str) -> str:
    """Name how long a computation's senders may repeat a record, which maintenance without the pipeline must know."""
    return _ID_SLACK_PREFIX + quoted(computation)


def location_app_id(place: str) -> str:
    """Name a place where the store lies: its absolute path or URL."""
    return LOCATION_PREFIX + quoted(place)


def incarnation_app_id(incarnation: str, origin: str) -> str:
    """Name an incarnation of the store and its ``origin``."""
    return INCARNATION_PREFIX + quoted(incarnation, origin)


def fork_app_id(incarnation: str, pipeline: str) -> str:
    """Name the superstep of a pipeline that an incarnation began with."""
    return FORK_PREFIX + quoted(incarnation, pipeline)


def sink_app_id(store_id: str, pipeline: str, name: str, incarnation: str = "") -> str:
    """Name, in a sink's own table, the last superstep that an incarnation of a store delivered to it.

    The first incarnation has the store's id, and no part of its own.

    Example:
        >>> sink_app_id("51d0", "zeitgeist", "spikes")
        'millpond/sink/51d0/zeitgeist/spikes'
        >>> sink_app_id("51d0", "zeitgeist", "spikes", "77ab")
        'millpond/sink/51d0/zeitgeist/spikes/77ab'
    """
    later = () if incarnation in ("", store_id) else (incarnation,)
    return SINK_PREFIX + quoted(store_id, pipeline, name, *later)
