"""When a commit is refused: rules about the table, and invariants about the request.

Every commit of an interval passes all of them, on the snapshot that it is built on, because
only one function turns a `CommitRequest` into actions. A broken rule is caused by other
writers (`FencedError`, `ConflictError`); a broken invariant is a bug in Millpond. The fence
is MillWheel's sequencer check (§6.2).

The request for a commit: intervals, files and positions that change together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.errors import ConflictError, FencedError, InvalidError, check
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalWrite:
    """One interval's part of a commit.

    Args:
        interval: the interval.
        fence: its new sequencer and commit number; it must follow the stored fence.
        added: row files written for this commit.
        removed: paths of live files that the added ones replace.
        watermark: the interval's input low watermark, journaled in the commit.
    """

    interval: Interval
    fence: Fence
    added: tuple[RowFile, ...] = ()
    removed: tuple[str, ...] = ()
    watermark: EventTimeMicros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """All changes of one commit.

    Equal requests are the same commit: repeating one after `OutcomeUnknownError` is safe.

    Args:
        kind: the purpose: "superstep", "fence", "compaction", …
        writes: the touched intervals.
        positions: other Delta transactions: inputs and supersteps by application id.
        metadata: for readers of the log; stored in ``commitInfo.millpond``.
        renames: computations whose files become those of another, old name to new. The request writes every
            interval of both.
        source_offsets: by the application id of an input, where its position lies in the source. Each commit repeats
            those of the commits before it.
        drops: computations whose files are removed. The request writes every interval of theirs.
    """

    kind: str
    writes: tuple[IntervalWrite, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()
    source_offsets: Mapping[str, str] = field(default_factory=dict)


Predicate = Callable[[CommitRequest, Snapshot], None]
"""Raises when a request must not be committed on a snapshot."""

_COMMIT_NUMBERS: Final = 1 << 32
_FENCED_PREFIXES: Final = (AppId.INPUT, AppId.SUPERSTEP)


def fences_follow(request: CommitRequest, snapshot: Snapshot) -> None:
    """Each interval's new fence follows the stored one (promise I4); see `Fence.follows`."""
    for write in request.writes:
        stored = snapshot.fence_of(write.interval)
        if not write.fence.follows(stored):
            raise FencedError(
                "another owner has taken the interval, or this commit has already been made: the other process goes on, "
                "and this one ends",
                interval=write.interval.app_id,
                stored=stored,
                mine=write.fence,
            )


def positions_do_not_fall(request: CommitRequest, snapshot: Snapshot) -> None:
    """No input, superstep or other position goes back (promise I2); a dropped savepoint's name is free again."""
    for app_id, position in request.positions.items():
        stored = snapshot.txns.get(app_id)
        is_savepoint = app_id.startswith(AppId.SAVEPOINT)
        if stored is not None and position < stored and not is_savepoint:
            raise ConflictError("a position would go back", app_id=app_id, stored=stored, position=position)


def savepoints_have_free_names(request: CommitRequest, snapshot: Snapshot) -> None:
    """No savepoint takes the name of another one that is open."""
    for app_id, version in request.positions.items():
        if app_id.startswith(AppId.SAVEPOINT) and version != SAVEPOINT_RELEASED:
            stored = snapshot.txns.get(app_id, SAVEPOINT_RELEASED)
            if stored not in (SAVEPOINT_RELEASED, version):
                raise ConflictError("another savepoint has that name", app_id=app_id, version=stored)


def taken_intervals_are_live(request: CommitRequest, snapshot: Snapshot) -> None:
    """Nothing takes an interval whose keys have been cut into others since, unless it fences those too.

    The intervals of a computation share no keys (MillWheel §7.1): a split or a merge fences what it replaces in the
    commit that takes what replaces it, under higher sequencers.
    """
    taken = [write for write in request.writes if write.fence.commit_number == 0]
    written = {write.interval for write in request.writes}
    live = {
        computation: snapshot.live_intervals(computation)
        for computation in {write.interval.computation for write in taken}
    }
    for write in taken:
        of_computation = live[write.interval.computation]
        if write.interval in of_computation:
            continue
        for other, fence in of_computation.items():
            if not other.overlaps(write.interval):
                continue
            if other not in written:
                raise ConflictError(
                    "the keys have been cut into other intervals",
                    interval=write.interval.app_id,
                    by=other.app_id,
                )
            check(
                write.fence.sequencer > fence.sequencer,
                "what replaces an interval has a higher sequencer",
                interval=write.interval.app_id,
                replaced=other.app_id,
            )


def removed_files_are_live(request: CommitRequest, snapshot: Snapshot) -> None:
    """Removed files are still live, so two compactions never both replace a file."""
    for write in request.writes:
        for path in write.removed:
            if snapshot.file(path) is None:
                raise ConflictError("a file to be removed is no longer live", path=path)


def request_is_whole(request: CommitRequest, _snapshot: Snapshot) -> None:
    """A request names each interval, added file and removed file once."""
    intervals = [write.interval for write in request.writes]
    check(len(set(intervals)) == len(intervals), "a commit names an interval once")
    added = [file.path for write in request.writes for file in write.added]
    check(len(set(added)) == len(added), "a commit adds a file once")
    fences = {interval.app_id for interval in intervals}
    check(fences.isdisjoint(request.positions), "a position is no interval's fence")
    removed = [path for write in request.writes for path in write.removed]
    check(len(set(removed)) == len(removed), "a commit removes a file once")


def positions_are_fenced(request: CommitRequest, _snapshot: Snapshot) -> None:
    """Inputs are consumed only together with an interval's fence; otherwise a former owner could consume them."""
    consumed = [app_id for app_id in request.positions if app_id.startswith(_FENCED_PREFIXES)]
    if consumed and not request.writes:
        raise InvalidError(
            "a pipeline's position moves only with a write of one of its intervals", app_ids=consumed
        )


def fences_are_sound(request: CommitRequest, _snapshot: Snapshot) -> None:
    """Numbers are in range, and a takeover adds no files (the new owner cannot have written any yet)."""
    for write in request.writes:
        number = write.fence.commit_number
        check(write.fence.sequencer > 0, "sequencers count from 1", fence=write.fence)
        check(0 <= number < _COMMIT_NUMBERS, "commit numbers have 32 bits", fence=write.fence)
        check(number > 0 or not (write.added or write.removed), "a fence commit has no files")


def moved_computations_are_fenced(request: CommitRequest, snapshot: Snapshot) -> None:
    """A computation whose rows move or are removed is fenced in all of its intervals, and its rows move to an unused name."""
    leaving = {*request.renames, *request.drops}
    if not leaving:
        return
    written = {write.interval for write in request.writes if write.fence.commit_number}
    for interval in snapshot.live_intervals():
        is_fenced = interval in written or interval.computation not in leaving
        check(is_fenced, "a computation moves with all of its intervals", interval=interval.app_id)
    for name in request.renames.values():
        check(not snapshot.files_in(name), "rows move to a name without rows", computation=name)


def files_are_the_writers(request: CommitRequest, snapshot: Snapshot) -> None:
    """Added files hold keys of their interval, were written under the request's fence, and are new."""
    for write in request.writes:
        for file in write.added:
            check(_within(write, file.min_key, file.max_key), "a file lies in its interval", path=file.path)
            check(
                Fence(file.sequencer, file.commit_number) == write.fence,
                "a file was written for this commit",
                path=file.path,
                fence=write.fence,
            )
            check(snapshot.file(file.path) is None, "an added file is new", path=file.path)


def _within(write: IntervalWrite, low: str, high: str) -> bool:
    return low <= high and write.interval.contains(low) and write.interval.contains(high)


INVARIANTS: Final[tuple[Predicate, ...]] = (
    request_is_whole,
    fences_are_sound,
    files_are_the_writers,
    positions_are_fenced,
    moved_computations_are_fenced,
)
"""Facts that hold for every request, unless there is a bug."""

RULES: Final[tuple[Predicate, ...]] = (
    fences_follow,
    taken_intervals_are_live,
    positions_do_not_fall,
    savepoints_have_free_names,
    removed_files_are_live,
)
"""Conditions that other writers' commits may break."""


def check_commit(request: CommitRequest, snapshot: Snapshot) -> None:
    """Check a request against all `RULES` and `INVARIANTS` on one snapshot.

    Raises:
        FencedError: another owner has an interval.
        ConflictError: the table moved on in a way that forbids the commit.
        InvalidError: the request contradicts itself.
        InternalError: an invariant is broken.
    """
    for predicate in (*RULES, *INVARIANTS):
        predicate(request, snapshot)
