"""The positions that a pipeline keeps in the table as Delta ``txn`` actions, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from millpond.executor.time.clocks import EXACT, clock_name
from millpond.statestore.app_ids import AppId, pipeline_number, recorded_word, supersteps_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import Superstep

BOUNDED_SOURCE = "bounded"
"""Source id of an input that is a bounded DataFrame: its only batch is 0."""

LOCAL_SOURCE = "local"
"""Source id of rows handed to a runner in process."""

_SLACK_BITS = 42


def percentile_watermark_app_id(pipeline: str, kind: str, name: str, percentile: float = EXACT) -> str:
    """Names a journaled watermark of a percentile; ``kind`` is ``injector`` or ``computation``."""
    # The clock's own name, so that 90 and 90.0 are one watermark here as in the rows.
    clock = clock_name(TimeDomain.EVENT, percentile)
    return AppId.WATERMARK.of(pipeline, kind, name) + clock.removeprefix(TimeDomain.EVENT.value)


def counts_by_computation(positions: Mapping[str, int], pipeline: str) -> dict[str, dict[str, int]]:
    """Every counter of a pipeline's computations, by name."""
    counts: dict[str, dict[str, int]] = {}
    for app_id, value in positions.items():
        if app_id.startswith(AppId.COUNT):
            of, computation, counter = AppId.COUNT.parts(app_id)
            if of == pipeline:
                counts.setdefault(computation, {})[counter] = value
    return counts


def stream_number(stream: str) -> int:
    """A stream's name as a number that a Delta ``txn`` can hold."""
    return pipeline_number(stream)


def claimed_by(positions: Mapping[str, int], pipeline: str) -> frozenset[str]:
    """Every computation that a pipeline has ever run, including those that it no longer has."""
    number = pipeline_number(pipeline)
    return frozenset(
        unquote(app_id.removeprefix(AppId.CLAIM))
        for app_id, version in positions.items()
        if version == number and app_id.startswith(AppId.CLAIM)
    )


def conflicting_pipeline(positions: Mapping[str, int], pipeline: str, computation: str) -> str | None:
    """The other pipeline that a computation belongs to; ``None`` when it is free or one's own."""
    number = positions.get(AppId.CLAIM.of(computation))
    if number in (None, pipeline_number(pipeline)):
        return None
    return next((name for name in supersteps_of(positions) if pipeline_number(name) == number), "another one")


def id_slack_position(stored: int | None, slack_us: int) -> int:
    """How long a computation's senders may repeat a record, as a number that rises with each change.

    Args:
        stored: the number that the table has; ``None``: none yet.
        slack_us: the slack, which is rounded up to milliseconds; at most 139 years are stored.

    Example:
        >>> first = id_slack_position(None, 2_000_000)
        >>> second = id_slack_position(first, 1_000_000)
        >>> second > first, id_slack_of({AppId.ID_SLACK.of("c"): second}, "c")
        (True, 1000000)
    """
    slack_ms = min(-(-slack_us // 1_000), (1 << _SLACK_BITS) - 1)
    changes, stored_ms = divmod(0 if stored is None else stored, 1 << _SLACK_BITS)
    return (changes << _SLACK_BITS if slack_ms == stored_ms else (changes + 1) << _SLACK_BITS) + slack_ms


def id_slack_of(positions: Mapping[str, int], computation: str) -> int | None:
    """How long a computation's senders may repeat a record, in microseconds; ``None`` where no pipeline has said so."""
    position = positions.get(AppId.ID_SLACK.of(computation))
    return None if position is None else position % (1 << _SLACK_BITS) * 1_000


def current_name(positions: Mapping[str, int], stored: str) -> str:
    """What a pipeline is called now that the store knows by the name ``stored``.

    Example:
        >>> current_name({"millpond/pipeline_name/clicks/visits": 7}, "clicks")
        'visits'
    """
    return recorded_word(positions, AppId.PIPELINE_NAME, stored) or stored


def stored_state_version(positions: Mapping[str, int], computation: str) -> int:
    """The ``state_version`` of the code that has last run a computation; 0 if the table records none."""
    return int(recorded_word(positions, AppId.STATE_VERSION, computation) or 0)


def consumed_elsewhere(positions: Mapping[str, int], pipeline: str, source: str) -> str | None:
    """Another pipeline of the store that has consumed batches of an outside source; ``None`` if none has.

    Only a source with an id of its own tells: Spark's streaming queries have one.
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
    """The last superstep that has been committed; 0 before the first."""
    return Superstep(positions.get(AppId.SUPERSTEP.of(pipeline), 0))


def input_positions(positions: Mapping[str, int], pipeline: str, stream: str) -> dict[str, int]:
    """Source id → last batch consumed, of one input.

    Example:
        >>> input_positions({AppId.INPUT.of("p", "s", "q1"): 4}, "p", "s")
        {'q1': 4}
    """
    prefix = AppId.INPUT.of(pipeline, stream, "")
    return {
        unquote(app_id.removeprefix(prefix)): version
        for app_id, version in positions.items()
        # A repair cannot take a position out of the table; below 0 it was never consumed.
        if app_id.startswith(prefix) and version >= 0
    }


def after_the_end(stream: str) -> InvalidError:
    """What refuses records of a stream whose input an earlier run has ended."""
    return InvalidError(
        "the input has ended: an earlier run was its last, so all that comes now would be late; a job that runs"
        " again and again passes finish=False to run, or trigger={'availableNow': True} to start, and begins"
        " with a new store; accept_ended=True of the runner takes the records as late ones",
        input=stream,
    )


def consumed_before(stream: str, rows: int, known: int | None) -> str:
    """Why a bounded DataFrame that the store has consumed before is not read again.

    Args:
        stream: the input, for the message.
        rows: how many rows it has now.
        known: how many it had then; ``None`` if the store does not know.

    Raises:
        InvalidError: it is another one, or it has grown.
    """
    if known is None:
        return "it was consumed before, by a version that did not note how many rows there were"
    if rows == known:
        return f"all {rows:,} rows were consumed before"
    raise InvalidError(
        "a bounded DataFrame is consumed once, and this one is not what it was then: read what grows as a stream"
        " (spark.readStream), which goes on where it was, or start with a new store",
        input=stream,
        rows=rows,
        consumed=known,
    )


def admit_batch(
    known: Mapping[str, int], stream: str, source: str, batch: int, *, accept_checkpoint: bool = False
) -> bool:
    """Whether a batch is new; a batch that Spark replays after a crash is not.

    A source hands out the batches 0, 1, 2, … and repeats at most the last one, so
    anything else means that checkpoint and store do not belong together.

    Args:
        known: source id → last batch consumed.
        stream: the input, for the message.
        source: id of the source that offers the batch.
        batch: its number.
        accept_checkpoint: take a source that the store does not know from where it stands.

    Raises:
        InvalidError: the checkpoint was rewound, is ahead, or belongs to another store.
    """
    belongs = "continue with the checkpoint that belongs to this store, start with a new store"
    way_out = f"{belongs}, or pass accept_checkpoint=True to take this one from where it stands"
    if_repaired = (
        "if the store was repaired, run `millpond repair` again: it takes the checkpoint back; else "
    )
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
    if batch in (last, last + 1):
        return batch == last + 1
    fault = "was rewound; " if batch < last else f"is ahead of the store; {if_repaired}"
    raise InvalidError(
        f"the checkpoint {fault}{belongs}",
        input=stream, checkpoint=source, batch=batch, store_has_consumed=last,
    )  # fmt: skip
