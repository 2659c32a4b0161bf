"""Application ids of Delta ``txn`` actions: a store's durable record of owners, inputs, time and counts.

A ``txn`` survives log cleanup and checkpoints (but for `forgotten_txns`), changes in the same commit as the
rows, and is visible to every Delta reader, so everything that a restart must know is stored as one. Versions only
rise. An id has the form ``millpond/<kind>/<part>/…`` with quoted parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

from millpond.statestore.types import Superstep

# The ``txn`` version of a dropped savepoint; no table version is as high.
SAVEPOINT_RELEASED: Final = 2**63 - 1
# The table version that the last repair or rewind wrote.
RESTORED_APP_ID: Final = "millpond/restored"


class AppId(StrEnum):
    """The prefix of each kind of id, with its parts and the meaning of its version.

    A word (codec, pipeline name, state version, columns, declared intervals) has the table version that
    recorded it, so the newest word counts; see `recorded_word`.

    Example:
        >>> AppId.INPUT.of("zeitgeist", "page views", "bounded")
        'millpond/input/zeitgeist/page%20views/bounded'
        >>> AppId.INPUT.parts("millpond/input/zeitgeist/page%20views/bounded")
        ('zeitgeist', 'page views', 'bounded')
    """

    # Computation, low and high key: the sequencer and commit number, packed. See `Interval.app_id`.
    INTERVAL = "millpond/interval/"
    # Computation: the number of the pipeline that owns it. There is one claim per computation, so
    # only one of two pipelines that want the same computation can commit.
    CLAIM = "millpond/claim/"
    # Pipeline: its last superstep.
    SUPERSTEP = "millpond/superstep/"
    # Pipeline, stream, source: the last batch consumed, negative after a repair reverted it.
    INPUT = "millpond/input/"
    # Pipeline, stream: how many rows of a bounded input count towards its watermark.
    INPUT_ROWS = "millpond/input_rows/"
    # Pipeline, stream: how many rows the pipeline has ever accepted from calls to `inject`.
    INJECTED = "millpond/injected/"
    # Pipeline, computation, stream: twice the history records consumed, plus one once that is all of them.
    # Negative after a repair reverted the backfill.
    BACKFILL = "millpond/backfill/"
    # Pipeline, "injector" or "computation", name: a journaled low watermark in microseconds of event time.
    WATERMARK = "millpond/watermark/"
    # Pipeline: the greatest event time of its outside records, where code sets timers.
    LAST_EVENT = "millpond/last_event/"
    # Pipeline, stream, member ("" for a stream without members): the declared status.
    MEMBER_STATUS = "millpond/standing/"
    # Pipeline, counter: a running total over the pipeline's life, such as ``records``.
    TOTAL = "millpond/total/"
    # Pipeline, computation, counter.
    COUNT = "millpond/count/"
    # Pipeline, action, selection: a request about dead letters. Even while open, the next odd number when done.
    LETTERS = "millpond/letters/"
    # Computation, "split" or "merge", key: a cut made offline. Even while open, the next odd number when done.
    CUT = "millpond/cut/"
    # Computation: the stream whose record ids are stored unchanged. The choice is made once, when the first
    # stream with ids is consumed, because stored ids must still match later deliveries.
    BARE_IDS = "millpond/bare_ids/"
    # Computation: how long senders may repeat a record, for maintenance without the pipeline.
    ID_SLACK = "millpond/id_slack/"
    # Stored name of a pipeline, its present name.
    PIPELINE_NAME = "millpond/pipeline_name/"
    # Computation, codec of its states.
    CODEC = "millpond/codec/"
    # Computation, version of the states that its code writes.
    STATE_VERSION = "millpond/state_version/"
    # Computation, the declarations on which the states of a library step depend, as JSON; an empty object for user code.
    FINGERPRINT = "millpond/fingerprint/"
    # Computation, columns of its typed keys; see `millpond.statestore.rows.key_columns`.
    KEY_COLUMNS = "millpond/key_columns/"
    # Computation, columns that views show of its states; see `millpond.statestore.view_columns`.
    STATE_COLUMNS = "millpond/state_columns/"
    # Computation, declared number of intervals when its keys were cut; "runner-" and the number that the caller of the
    # runner gave, or 0 if it was left to a default.
    DECLARED_INTERVALS = "millpond/declared_intervals/"
    # Name: the table version that the savepoint keeps readable, or `SAVEPOINT_RELEASED`.
    SAVEPOINT = "millpond/savepoint/"
    # Absolute path or URL of the store: the first table version written there.
    LOCATION = "millpond/location/"
    # Id and hosts of the ZooKeeper ensemble that serves the store; see `millpond.statestore.leases.ensemble`.
    ENSEMBLE = "millpond/ensemble/"
    # Incarnation, origin: the first table version of an incarnation after the first.
    INCARNATION = "millpond/incarnation/"
    # Incarnation, pipeline: the superstep that the incarnation began with.
    FORK = "millpond/fork/"
    # In a sink's own table: the last superstep delivered. See `sink_app_id`.
    SINK = "millpond/sink/"
    # In a sink's own table: store id, pipeline, sink, incarnation. The table version with which a copy of the store took
    # the sink over; the newest counts.
    SINK_OWNER = "millpond/sink_owner/"
    # Pipeline, sink: a superstep that the sink has, and where its destination is. See `sink_reached`.
    SINK_REACHED = "millpond/sink_reached/"
    # Pipeline, sink ("" for the pipeline itself): twice a superstep that the sink was served with, plus one once the
    # pipeline has it no more: the last that it may have.
    SINK_SERVED = "millpond/sink_served/"
    # Incarnation of a fork, identity of a sink's destination: the fork writes there itself.
    SINK_TAKEN = "millpond/sink_taken/"

    @lru_cache(maxsize=65_536)
    def of(self, *parts: str | int) -> str:
        return self + quoted(*parts)

    def parts(self, app_id: str) -> tuple[str, ...]:
        return tuple(unquote(part) for part in app_id.removeprefix(self).split("/"))


# The kinds whose readers take an id apart.
_PARTS: Final = {
    AppId.SINK_REACHED: 2,
    AppId.SINK_SERVED: 2,
    **dict.fromkeys((AppId.INCARNATION, AppId.FORK, AppId.SINK_TAKEN, AppId.ENSEMBLE), 2),
    **dict.fromkeys((AppId.CODEC, AppId.STATE_VERSION, AppId.KEY_COLUMNS, AppId.STATE_COLUMNS), 2),
    **dict.fromkeys((AppId.DECLARED_INTERVALS, AppId.PIPELINE_NAME, AppId.FINGERPRINT), 2),
    **dict.fromkeys((AppId.INTERVAL, AppId.INPUT, AppId.COUNT, AppId.BACKFILL), 3),
    **dict.fromkeys((AppId.LETTERS, AppId.CUT, AppId.WATERMARK), 3),
}


@lru_cache(maxsize=65_536)
def is_app_id(app_id: str) -> bool:
    """Return False for an id of ours that lacks a part or has one too many; ids of other applications are free.

    Example:
        >>> [is_app_id(app_id) for app_id in ("millpond/input/p/s/q", "millpond/input/p", "theirs/input")]
        [True, False, True]
    """
    own, _, rest = app_id.partition("/")
    kind, _, parts = rest.partition("/")
    wanted = _PARTS.get(f"{own}/{kind}/")  # type: ignore[call-overload]
    return wanted is None or parts.count("/") + 1 == wanted


def quoted(*parts: str | int) -> str:
    return "/".join(quote(str(part), safe="") for part in parts)


def sink_app_id(store_id: str, pipeline: str, name: str, incarnation: str = "") -> str:
    """Return the id, in a sink's own table, of the last superstep that an incarnation delivered.

    The id of the first incarnation, which has the store's id, lacks that part.
    """
    later = () if incarnation in ("", store_id) else (incarnation,)
    return AppId.SINK.of(store_id, pipeline, name, *later)


_PLACE_BITS: Final = 31
_NO_PLACE: Final = (1 << _PLACE_BITS) - 1


def sink_reached(superstep: int, identity: str) -> int:
    """Return the version that records a superstep of a sink's destination; "" for a sink that begins anew, wherever it is.

    Example:
        >>> at = sink_reached(7, "/out/s")
        >>> [superstep_reached(at, place) for place in ("/out/s", "/out/t")], at < sink_reached(7, "")
        ([7, 0], True)
    """
    digest = int.from_bytes(hashlib.sha256(identity.encode(errors="surrogatepass")).digest()[:8], "big")
    return superstep << _PLACE_BITS | (digest % _NO_PLACE if identity else _NO_PLACE)


def superstep_reached(version: int, identity: str) -> int:
    """Return the superstep that a destination must have; 0 if nothing is recorded of it."""
    superstep = version >> _PLACE_BITS
    return superstep if version == sink_reached(superstep, identity) else 0


def is_elsewhere(version: int, identity: str) -> bool:
    """Return True if the recorded superstep is another destination's."""
    return version & _NO_PLACE != _NO_PLACE and not superstep_reached(version, identity)


def supersteps_of(txns: Mapping[str, int]) -> dict[str, Superstep]:
    return {
        unquote(app_id.removeprefix(AppId.SUPERSTEP)): Superstep(superstep)
        for app_id, superstep in txns.items()
        if app_id.startswith(AppId.SUPERSTEP)
    }


def pipeline_number(pipeline: str) -> int:
    """Return a pipeline's name as a number that a ``txn`` can hold."""
    return int.from_bytes(hashlib.sha256(pipeline.encode()).digest()[:8], "big") >> 1


def recorded_word(positions: Mapping[str, int], kind: AppId, computation: str) -> str | None:
    words = {
        parts[1]: version
        for app_id, version in positions.items()
        # A rewind makes a reverted word negative, because no word ever leaves the table.
        if version >= 0 and app_id.startswith(kind) and (parts := kind.parts(app_id))[0] == computation
    }
    return max(words, key=words.__getitem__, default=None)


def recorded_names(positions: Mapping[str, int], kind: AppId) -> frozenset[str]:
    """Return the computations with a word of this kind."""
    return frozenset(
        kind.parts(app_id)[0]
        for app_id, version in positions.items()
        if version >= 0 and app_id.startswith(kind)
    )
