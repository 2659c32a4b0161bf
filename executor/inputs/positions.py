"""The positions that a pipeline keeps in the table as Delta ``txn`` actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import orjson

from millpond.executor.time.clocks import EXACT, clock_name
from millpond.statestore.app_ids import AppId, pipeline_number, recorded_word, supersteps_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import Superstep

BOUNDED_SOURCE = "bounded"
LOCAL_SOURCE = "local"
_SLACK_BITS = 42


def percentile_watermark_app_id(pipeline: str, kind: str, name: str, percentile: float = EXACT) -> str:
    """Return the app id of a journaled percentile watermark; ``kind`` is ``injector`` or ``computation``."""
    # The clock's own name, so that 90 and 90.0 are one watermark here as in the rows.
    clock = clock_name(TimeDomain.EVENT, percentile)
    return AppId.WATERMARK.of(pipeline, kind, name) + clock.removeprefix(TimeDomain.EVENT.value)


def counts_by_computation(positions: Mapping[str, int], pipeline: str) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for app_id, value in positions.items():
        if app_id.startswith(AppId.COUNT):
            of, computation, counter = AppId.COUNT.parts(app_id)
            if of == pipeline:
                counts.setdefault(computation, {})[counter] = value
    return counts


def claimed_by(positions: Mapping[str, int], pipeline: str) -> frozenset[str]:
    """Return every computation that a pipeline has ever run, including former ones."""
    number = pipeline_number(pipeline)
    return frozenset(
        unquote(app_id.removeprefix(AppId.CLAIM))
        for app_id, version in positions.items()
        if version == number and app_id.startswith(AppId.CLAIM)
    )


def conflicting_pipeline(positions: Mapping[str, int], pipeline: str, computation: str) -> str | None:
    """Return the other pipeline that owns a computation; ``None`` when it is free or already owned by this one."""
    number = positions.get(AppId.CLAIM.of(computation))
    if number in (None, pipeline_number(pipeline)):
        return None
    return next((name for name in supersteps_of(positions) if pipeline_number(name) == number), "another one")


def id_slack_position(stored: int | None, slack_us: int) -> int:
    """Return an id slack as a number that rises with each change: in milliseconds, rounded up, at most 139 years."""
    slack_ms = min(-(-slack_us // 1_000), (1 << _SLACK_BITS) - 1)
    changes, stored_ms = divmod(0 if stored is None else stored, 1 << _SLACK_BITS)
    return (changes << _SLACK_BITS if slack_ms == stored_ms else (changes + 1) << _SLACK_BITS) + slack_ms


def id_slack_of(positions: Mapping[str, int], computation: str) -> int | None:
    """Return how long a computation's senders may repeat a record, in microseconds; ``None`` if not recorded."""
    position = positions.get(AppId.ID_SLACK.of(computation))
    return None if position is None else position % (1 << _SLACK_BITS) * 1_000


def current_name(positions: Mapping[str, int], stored: str) -> str:
    return recorded_word(positions, AppId.PIPELINE_NAME, stored) or stored


def stored_state_version(positions: Mapping[str, int], computation: str) -> int:
    """Return the ``state_version`` of the code that ran a computation last; 0 if the table records none."""
    return int(recorded_word(positions, AppId.STATE_VERSION, computation) or 0)


def consumed_elsewhere(positions: Mapping[str, int], pipeline: str, source: str) -> str | None:
    """Return another pipeline of the store that has consumed batches of the source; ``None`` without one.

    Only sources with separate ids are found, such as Spark's streaming queries.
    """
    if source in (BOUNDED_SOURCE, LOCAL_SOURCE):
        return None
    consumers = (
        AppId.INPUT.parts(app_id)
        for app_id, version in positions.items()
        if app_id.startswith(AppId.INPUT) and version >= 0
    )
    return next((parts[0] for parts in consumers if parts[2:] == (source,) and parts[0] != pipeline), None)


def superstep_of(positions: Mapping[str, int], pipeline: str) -> Superstep:
    return Superstep(positions.get(AppId.SUPERSTEP.of(pipeline), 0))


def input_positions(positions: Mapping[str, int], pipeline: str, stream: str) -> dict[str, int]:
    prefix = AppId.INPUT.of(pipeline, stream, "")
    return {
        unquote(app_id.removeprefix(prefix)): version
        for app_id, version in positions.items()
        # A repair cannot take a position out of the table; below 0 it was never consumed.
        if app_id.startswith(prefix) and version >= 0
    }


def consumed_streams(positions: Mapping[str, int], pipeline: str) -> frozenset[str]:
    """Return the injected streams of which a pipeline has consumed anything."""
    kinds = {AppId.INPUT: -1, AppId.INJECTED: 0}
    return frozenset(
        kind.parts(app_id)[1]
        for app_id, version in positions.items()
        for kind, none in kinds.items()
        if app_id.startswith(kind) and version > none and kind.parts(app_id)[0] == pipeline
    )


def after_the_end(stream: str) -> InvalidError:
    """Return the error for records of a stream whose input an earlier run has ended."""
    return InvalidError(
        "the input has ended: an earlier run was its last, so further records would be late; a job that runs"
        " again and again passes finish=False to run, or trigger={'availableNow': True} to start, and begins"
        " with a new store; accept_ended=True of the runner takes the records as late ones",
        input=stream,
    )


def digest_place(rows: int, digest: int | None, **place: Any) -> str:
    """Return the end of the first ``rows`` rows of an input in the words that `recorded_place` reads."""
    digests = {} if digest is None else {"digest": f"{digest:016x}"}
    return orjson.dumps({"rows": rows, **place, **digests}).decode()


def recorded_place(offsets: str | None, rows: int | None) -> dict[str, Any]:
    """Return what was recorded about the first ``rows`` rows of an input; empty if nothing was."""
    try:
        place = orjson.loads(offsets or "{}")
        # A record of another count is outdated: a repair moves positions without writing a record.
        return place if place.get("rows") == rows else {}
    except (ValueError, AttributeError):
        return {}


def digest_in(place: Mapping[str, Any], name: str = "digest") -> int | None:
    try:
        return int(place[name], 16)
    except (KeyError, TypeError, ValueError):
        return None


def consumed_before(stream: str, rows: int, known: int | None, *, is_same: bool = True) -> str:
    """Return why a bounded DataFrame is not read again; refuse a changed one.

    ``known`` is its number of rows when it was consumed; ``None`` if not recorded. ``is_same`` is False if the rows are
    others.
    """
    if known is None:
        return "it was consumed before, by a version that did not note how many rows there were"
    if rows == known and is_same:
        return f"all {rows:,} rows were consumed before"
    raise InvalidError(
        "a bounded DataFrame is consumed only once, and this one has changed since: read growing data as a stream"
        " (spark.readStream), which continues where it was, write a frame that is computed anew to a table first, or start"
        " with a new store",
        input=stream,
        rows=rows,
        consumed=known,
    )


def admit_batch(
    known: Mapping[str, int], stream: str, source: str, batch: int, *, accept_checkpoint: bool = False
) -> bool:
    """Return True for a new batch, False for one that Spark replays after a crash.

    A source hands out the batches 0, 1, 2, … and repeats at most the last one, so anything else means that
    checkpoint and store do not belong together. ``accept_checkpoint`` starts an unknown source at its present
    batch.
    """
    belongs = "continue with the checkpoint that belongs to this store, start with a new store"
    way_out = f"{belongs}, or pass accept_checkpoint=True to take this one from where it stands"
    if_repaired = "if the store was repaired, run `millpond repair` again: it reverts the checkpoint; else "
    last = known.get(source)
    if last is None:
        if accept_checkpoint or (not known and batch == 0):
            return True
        if known:
            raise InvalidError(
                f"this store has consumed the input through another checkpoint; {way_out}",
                input=stream, checkpoint=source, known=dict(known),
            )  # fmt: skip
        raise InvalidError(
            f"the checkpoint has handed out batches that this store never saw; {if_repaired}{way_out}",
            input=stream, checkpoint=source, batch=batch,
        )  # fmt: skip
    # After a crash between the store's commit and Spark's own, Spark repeats its last batch: skip it.
    if batch in (last, last + 1):
        return batch == last + 1
    fault = "was rewound; " if batch < last else f"is ahead of the store; {if_repaired}"
    raise InvalidError(
        f"the checkpoint {fault}{belongs}",
        input=stream, checkpoint=source, batch=batch, store_has_consumed=last,
    )  # fmt: skip
