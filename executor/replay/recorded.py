"""Recorded supersteps: how a past run consumed its inputs, according to its commits.

Each commit records how many rows of which input its superstep took, and under which conditions. So a replay can repeat
the supersteps one by one, with the same rows, wall times and watermarks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millpond.executor.inputs.extraction import Rows, row_count, rows_between
from millpond.executor.inputs.positions import LOCAL_SOURCE, superstep_of
from millpond.executor.local.rows import RowSource
from millpond.executor.watermark.authority import Conditions
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.replayed_log import LoggedCommit, read_commit
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Superstep, TableVersion

_ALL_AT_ONCE: Final = "recorded=False (`--all-at-once`) gives the input to the code in one run instead"
_NOT_REPEATED: Final = {
    "repair": "the store went back to an older version",
    "rewind": "the store went back to an older version",
    "load": "rows were loaded",
    "upgrade": "rows were upgraded",
}
"""Changes of rows other than supersteps, by kind of commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSuperstep:
    """A superstep of a past run."""

    version: TableVersion
    superstep: Superstep
    conditions: Conditions
    taken: tuple[tuple[str, int], ...] = ()  # rows injected by calls: streams with numbers of rows, in order
    stream: str | None = None  # the bounded input that it consumed
    consumed: int = 0  # rows of that input consumed after it
    observed: int | None = None  # rows that move the watermark from then on; ``None`` changes nothing
    journaled: Mapping[str, int]  # watermarks of the inputs after it, by application id


def consumed_rows(snapshot: Snapshot, pipeline: str, stream: str) -> int:
    """Return how many rows of an input a version has consumed, from a bounded input and by calls."""
    bounded = snapshot.txns.get(AppId.INPUT.of(pipeline, stream, LOCAL_SOURCE), 0)
    return max(bounded, 0) + snapshot.txns.get(AppId.INJECTED.of(pipeline, stream), 0)


def recorded_supersteps(
    log: Log, snapshot: Snapshot, until: TableVersion, pipeline: str
) -> Iterator[RecordedSuperstep]:
    """Yield the supersteps of a pipeline after ``snapshot`` up to ``until``, oldest first.

    Refuses collected commits, repairs and rewinds in between, and supersteps that Spark ran.
    """
    journaled = _journaled(snapshot.txns, pipeline)
    reached = {
        app_id: at
        for app_id, at in snapshot.txns.items()
        if app_id.startswith(AppId.INPUT) and AppId.INPUT.parts(app_id)[0] == pipeline
    }
    for number in range(snapshot.version + 1, until + 1):
        version = TableVersion(number)
        commit = read_commit(log, version)
        if commit is None:
            raise InvalidError(
                f"the log no longer records how the input was consumed up to that version; {_ALL_AT_ONCE}",
                missing=version,
                until=until,
            )
        _refuse_changes(commit)
        if commit.kind == "superstep" and commit.metadata.get("pipeline") == pipeline:
            journaled = journaled | _journaled(commit.txns, pipeline)
            reached |= {app_id: at for app_id, at in commit.txns.items() if app_id.startswith(AppId.INPUT)}
            yield _recorded(commit, pipeline, journaled, reached)


def _refuse_changes(commit: LoggedCommit) -> None:
    what = _NOT_REPEATED.get(commit.kind)
    if what is None and any(
        app_id.startswith(AppId.LETTERS) and at % 2 == 0 for app_id, at in commit.txns.items()
    ):
        what = "dead letters were asked for once more, or dropped"
    if what is not None:
        raise InvalidError(
            f"{what} in between, which a replay does not repeat: end it before, or begin it there",
            version=commit.version,
        )


def _recorded(
    commit: LoggedCommit, pipeline: str, journaled: Mapping[str, int], reached: Mapping[str, int]
) -> RecordedSuperstep:
    metadata = commit.metadata
    if "conditions" not in metadata:
        raise InvalidError(
            f"that superstep was run by an older Millpond, which did not record its conditions; {_ALL_AT_ONCE}",
            version=commit.version,
        )
    if "backfill" in metadata:
        raise InvalidError(
            "a computation was given a backfill by that superstep, which is not repeated: begin after it",
            version=commit.version,
            computation=metadata["backfill"],
        )
    given, taken = metadata.get("input"), metadata.get("taken")
    stream, consumed, observed = None, 0, None
    if isinstance(given, str):
        stream, observed = given, commit.txns.get(AppId.INPUT_ROWS.of(pipeline, given))
        local = AppId.INPUT.of(pipeline, stream, LOCAL_SOURCE)
        moved = [app_id for app_id in commit.txns if app_id.startswith(AppId.INPUT.of(pipeline, stream, ""))]
        if any(app_id != local for app_id in moved) or local not in reached:
            raise InvalidError(
                "that superstep consumed a batch of Spark, and how many rows it had is not known: replay it on Spark, "
                "with the same source",
                version=commit.version,
                input=stream,
            )
        consumed = reached[local]
    return RecordedSuperstep(
        version=commit.version,
        superstep=superstep_of(commit.txns, pipeline),
        conditions=Conditions.from_json(metadata["conditions"]),
        taken=tuple((str(name), int(count)) for name, count in taken) if isinstance(taken, list) else (),
        stream=stream,
        consumed=consumed,
        observed=observed,
        journaled=journaled,
    )


def _journaled(txns: Mapping[str, int], pipeline: str) -> dict[str, int]:
    watermarks = ((app_id, at) for app_id, at in txns.items() if app_id.startswith(AppId.WATERMARK))
    return {
        app_id: at for app_id, at in watermarks if AppId.WATERMARK.parts(app_id)[:2] == (pipeline, "injector")
    }


_PIECE_RECORDS = 20_000


@dataclass(frozen=True)
class InputPart(RowSource):
    """A section of an input, from row number ``begins`` to before ``ends`` of the original."""

    source: RowSource
    begins: int
    ends: int

    @property
    def count(self) -> int:
        return self.ends

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        left = self.ends - start
        for count, rows in self.source.pieces(max(start - self.begins, 0), records_max):
            if left <= 0:
                return
            taken = min(count, left)
            yield taken, rows_between(rows, 0, taken)
            left -= taken

    def read(self, rows: Rows) -> Rows:
        return self.source.read(rows)

    def first(self, records_max: int) -> Rows:
        return self.source.first(records_max)

    def resume(self, count: int, place: Mapping[str, JsonValue]) -> int:
        # Of a section only the numbers of its rows are known.
        return count if self.begins else self.source.resume(count, place)

    def place(self, count: int) -> Mapping[str, JsonValue]:
        return {} if self.begins else self.source.place(count)

    def part_ends(self, start: int, stop: int) -> Sequence[int]:
        return () if self.begins else self.source.part_ends(start, stop)


class InputCursor:
    """A sequential reader of a source, from row number ``start`` on."""

    def __init__(self, source: RowSource, start: int) -> None:
        self._pieces = source.read_pieces(start, _PIECE_RECORDS)
        self._rows: Rows = []

    def take(self, count: int) -> Iterator[Rows]:
        """Yield the next rows in one piece or more; fewer at the end of the source."""
        while count:
            left = row_count(self._rows)
            if not left:
                left, self._rows = next(self._pieces, (0, []))
            if not left:
                return
            taken = min(count, left)
            yield rows_between(self._rows, 0, taken)
            self._rows = rows_between(self._rows, taken, left)
            count -= taken
