"""Recorded supersteps: what the commits of a store say about the supersteps that made them.

Each commit says how many rows its superstep took of which input, under which conditions. So the supersteps of a past
run can be repeated one by one, cut as they were, at their wall times and under the watermarks that they met.

The part of an input that a replay needs, under the numbers that its rows had in the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from millpond.executor.inputs.extraction import Rows
from millpond.executor.inputs.positions import LOCAL_SOURCE, superstep_of
from millpond.executor.local.rows import RowSource
from millpond.executor.watermark.authority import Conditions
from millpond.statestore.app_ids import AppId
from millpond.statestore.catalog.entries import CommitFacts
from millpond.statestore.catalog.rebuild import facts_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Superstep, TableVersion

_ALL_AT_ONCE: Final = "recorded=False (`--all-at-once`) gives the input to the code in one run instead"
_NOT_REPEATED: Final = {
    "repair": "the store went back to an older version",
    "rewind": "the store went back to an older version",
    "load": "rows were loaded",
    "upgrade": "rows were upgraded",
}
"""What changes rows apart from supersteps, by kind of commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSuperstep:
    """A superstep of a past run.

    Attributes:
        version: the version that it made.
        superstep: its number.
        conditions: what it met.
        taken: what was injected for it by calls, in order: streams, each with a number of rows.
        stream: the bounded input that it consumed; ``None`` without one.
        consumed: how many rows of that were consumed after it.
        observed: how many of these move the watermark from then on; ``None`` changes nothing.
        journaled: the watermarks of the inputs after it, by application id.
    """

    version: TableVersion
    superstep: Superstep
    conditions: Conditions
    taken: tuple[tuple[str, int], ...] = ()
    stream: str | None = None
    consumed: int = 0
    observed: int | None = None
    journaled: Mapping[str, int]


def consumed_rows(snapshot: Snapshot, pipeline: str, stream: str) -> int:
    """How many rows of an input a version has consumed: of a bounded one, and by calls."""
    bounded = snapshot.txns.get(AppId.INPUT.of(pipeline, stream, LOCAL_SOURCE), 0)
    return max(bounded, 0) + snapshot.txns.get(AppId.INJECTED.of(pipeline, stream), 0)


def recorded_supersteps(
    log: Log, snapshot: Snapshot, until: TableVersion, pipeline: str
) -> Iterator[RecordedSuperstep]:
    """The supersteps of a pipeline after a version, oldest first.

    Args:
        log: the store's log.
        snapshot: the store at the version.
        until: the last version.
        pipeline: the pipeline's name.

    Raises:
        InvalidError: the log does not say it: commits have been collected, or the store went back to an older version
            in between, or the supersteps were not run by the local runner.
        DataError: a commit file is damaged.
    """
    journaled = {app_id: at for app_id, at in snapshot.txns.items() if _is_of_input(app_id, pipeline)}
    reached = {
        app_id: at
        for app_id, at in snapshot.txns.items()
        if app_id.startswith(AppId.INPUT) and AppId.INPUT.parts(app_id)[0] == pipeline
    }
    for number in range(snapshot.version + 1, until + 1):
        version = TableVersion(number)
        data = log.read(version)
        if data is None:
            raise InvalidError(
                f"the log no longer says how the input was consumed up to that version; {_ALL_AT_ONCE}",
                missing=version,
                until=until,
            )
        facts = facts_of(version, decode(data, commit_path(version)))
        _refuse_changes(facts)
        if facts.metadata.get("kind") == "superstep" and facts.metadata.get("pipeline") == pipeline:
            journaled = journaled | {
                app_id: at for app_id, at in facts.txns.items() if _is_of_input(app_id, pipeline)
            }
            reached |= {app_id: at for app_id, at in facts.txns.items() if app_id.startswith(AppId.INPUT)}
            yield _recorded(facts, pipeline, journaled, reached)


def _refuse_changes(facts: CommitFacts) -> None:
    """Refuse what a replay would not do again.

    Raises:
        InvalidError: says what it is, and where.
    """
    what = _NOT_REPEATED.get(str(facts.metadata.get("kind")))
    if what is None and any(
        app_id.startswith(AppId.LETTERS) and at % 2 == 0 for app_id, at in facts.txns.items()
    ):
        what = "dead letters were asked for once more, or dropped"
    if what is not None:
        raise InvalidError(
            f"{what} in between, which a replay does not repeat: end it before, or begin it there",
            version=facts.version,
        )


def _recorded(
    facts: CommitFacts, pipeline: str, journaled: Mapping[str, int], reached: Mapping[str, int]
) -> RecordedSuperstep:
    metadata = facts.metadata
    if "conditions" not in metadata:
        raise InvalidError(
            f"that superstep was run by an older Millpond, which did not record its conditions; {_ALL_AT_ONCE}",
            version=facts.version,
        )
    if "backfill" in metadata:
        raise InvalidError(
            "a computation was given a backfill by that superstep, which is not repeated: begin after it",
            version=facts.version,
            computation=metadata["backfill"],
        )
    stream = metadata.get("input")
    consumed = 0
    if isinstance(stream, str):
        local = AppId.INPUT.of(pipeline, stream, LOCAL_SOURCE)
        moved = [app_id for app_id in facts.txns if app_id.startswith(AppId.INPUT.of(pipeline, stream, ""))]
        if any(app_id != local for app_id in moved) or local not in reached:
            raise InvalidError(
                "that superstep consumed a batch of Spark, and how many rows it had is not known: replay it on Spark, "
                "with the same source",
                version=facts.version,
                input=stream,
            )
        consumed = reached[local]
    taken = metadata.get("taken")
    return RecordedSuperstep(
        version=facts.version,
        superstep=superstep_of(facts.txns, pipeline),
        conditions=Conditions.from_json(metadata["conditions"]),
        taken=tuple((str(name), int(count)) for name, count in taken) if isinstance(taken, list) else (),
        stream=stream if isinstance(stream, str) else None,
        consumed=consumed,
        observed=None if stream is None else facts.txns.get(AppId.INPUT_ROWS.of(pipeline, str(stream))),
        journaled=journaled,
    )


def _is_of_input(app_id: str, pipeline: str) -> bool:
    if not app_id.startswith(AppId.WATERMARK):
        return False
    of, kind, *_ = app_id.removeprefix(AppId.WATERMARK).split("/")
    return (unquote(of), kind) == (pipeline, "injector")


_PIECE_RECORDS = 20_000


class InputPart(RowSource):
    """Rows of which those in front are missing, or which ends before its end; rows keep their numbers.

    Args:
        source: the rows that there are.
        begins: the number of the first of them.
        ends: the number of the first that does not belong to it.
    """

    def __init__(self, source: RowSource, begins: int, ends: int) -> None:
        self._source = source
        self._begins = begins
        self._ends = ends

    @property
    def count(self) -> int:
        """How many rows the original had consumed at its end, with those that are missing in front."""
        return self._ends

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows from a number on, in pieces."""
        left = self._ends - start
        for count, rows in self._source.pieces(max(start - self._begins, 0), records_max):
            if left <= 0:
                return
            if count > left:
                yield left, rows.slice(0, left) if isinstance(rows, pa.Table) else rows[:left]
                return
            yield count, rows
            left -= count

    def first(self, records_max: int) -> Rows:
        """The first rows that there are, at most so many."""
        return self._source.first(records_max)


class InputCursor:
    """Reads a source from front to back, as many rows at a time as are asked for.

    Args:
        source: the rows.
        start: the number of the first to be read.
    """

    def __init__(self, source: RowSource, start: int) -> None:
        self._pieces = source.pieces(start, _PIECE_RECORDS)
        self._rows: Rows = []
        self._left = 0

    def take(self, count: int) -> Iterator[Rows]:
        """The next rows, in one piece or more: all that there are, if these are fewer."""
        while count:
            if not self._left:
                self._left, self._rows = next(self._pieces, (0, []))
                if not self._left:
                    return
            taken = min(count, self._left)
            if isinstance(self._rows, pa.Table):
                yield self._rows.slice(0, taken)
                self._rows = self._rows.slice(taken)
            else:
                yield self._rows[:taken]
                self._rows = self._rows[taken:]
            self._left -= taken
            count -= taken
