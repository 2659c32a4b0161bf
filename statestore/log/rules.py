"""The request for a commit, and the rules and invariants under which it is refused.

Only one function turns a `CommitRequest` into actions, so every commit of an interval passes all rules, on the
snapshot that it is built on. Other writers break rules (`FencedError`, `ConflictError`); a broken invariant is a
bug in Millpond. The fence is MillWheel's sequencer check (§6.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from millpond.statestore.app_ids import SAVEPOINT_RELEASED, AppId
from millpond.statestore.errors import ConflictError, FencedError, InternalError, InvalidError, check
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalWrite:
    """One interval's part of a commit.

    The fence must follow the stored one. The added files replace the live files whose paths are ``removed``. The commit journals
    the interval's input low watermark. ``pending`` is what the interval still owes with the added files, in words of the
    owner's, which a later owner reads instead of all rows.
    """

    interval: Interval
    fence: Fence
    added: tuple[RowFile, ...] = ()
    removed: tuple[str, ...] = ()
    watermark: EventTimeMicros | None = None
    pending: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """All changes of one commit. Equal requests are the same commit: repeating one after `OutcomeUnknownError` is safe.

    Args:
        kind: the purpose: "superstep", "fence", "compaction", …
        positions: other Delta transactions: inputs and supersteps by application id.
        metadata: stored in ``commitInfo.millpond`` for readers of the log.
        renames: computations whose files move to another name, old name to new. The request must write every
            interval of both.
        drops: computations whose files are removed. The request must write all of their intervals.
        source_offsets: where an input's position lies in its source, by the input's application id.
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
    """Require that each new fence follows the stored one (promise I4)."""
    # One half of the fence; the other is the interval's `txn`, on which two commits collide. The comparison must
    # be made on the snapshot that the commit is built on: on an older one a takeover in between would go unseen.
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
    """Require that no position goes back (promise I2), except a released savepoint's."""
    for app_id, position in request.positions.items():
        stored = snapshot.txns.get(app_id)
        # A released savepoint frees its name, so its next version may be lower.
        is_savepoint = app_id.startswith(AppId.SAVEPOINT)
        if stored is not None and position < stored and not is_savepoint:
            raise ConflictError("a position would go back", app_id=app_id, stored=stored, position=position)


def savepoints_have_free_names(request: CommitRequest, snapshot: Snapshot) -> None:
    """Require that no savepoint takes the name of another open one."""
    for app_id, version in request.positions.items():
        if app_id.startswith(AppId.SAVEPOINT) and version != SAVEPOINT_RELEASED:
            stored = snapshot.txns.get(app_id, SAVEPOINT_RELEASED)
            if stored not in (SAVEPOINT_RELEASED, version):
                raise ConflictError("another savepoint has that name", app_id=app_id, version=stored)


def taken_intervals_are_live(request: CommitRequest, snapshot: Snapshot) -> None:
    """Require that a taken interval has not been cut into others, unless the commit fences those too.

    The intervals of a computation share no keys (MillWheel §7.1): a split or a merge fences the intervals that it
    replaces in the commit that takes the new ones, under higher sequencers.
    """
    # Number 0 is a taking. A former owner could otherwise take back the interval that was split behind its back.
    taken = [write for write in request.writes if write.fence.commit_number == 0]
    if not taken:
        return
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
    """Require that removed files are live, so that two compactions never replace the same file."""
    for write in request.writes:
        for path in write.removed:
            if snapshot.file(path) is None:
                raise ConflictError("a file to be removed is no longer live", path=path)


def request_is_whole(request: CommitRequest, _snapshot: Snapshot) -> None:
    """Require that a request names each interval, added file and removed file once."""
    fences: list[str] = []
    files: list[str] = []
    for write in request.writes:
        fences.append(write.interval.app_id)
        files += write.removed
        for file in write.added:
            files.append(file.path)
    if len(set(fences)) < len(fences) or len(set(files)) < len(files):
        raise InternalError("a commit names an interval or a file twice", intervals=fences, files=files)
    if not request.positions.keys().isdisjoint(fences):
        raise InternalError("a position is no interval's fence", intervals=fences)


def positions_are_fenced(request: CommitRequest, _snapshot: Snapshot) -> None:
    """Require a fence with every consumed input: otherwise a former owner could consume inputs."""
    if request.writes:
        return
    # A position moves only together with a fence, because nothing else would stop a former owner from consuming.
    consumed = [app_id for app_id in request.positions if app_id.startswith(_FENCED_PREFIXES)]
    if consumed:
        raise InvalidError(
            "a pipeline's position moves only with a write of one of its intervals", app_ids=consumed
        )


def fences_are_sound(request: CommitRequest, _snapshot: Snapshot) -> None:
    """Require numbers in range, and no files in a takeover: its owner cannot have written any yet."""
    for write in request.writes:
        sequencer, number = write.fence.sequencer, write.fence.commit_number
        if sequencer <= 0 or not 0 <= number < _COMMIT_NUMBERS:
            raise InternalError("sequencers count from 1, and commit numbers have 32 bits", fence=write.fence)
        if not number and (write.added or write.removed):
            raise InternalError("a fence commit has no files", interval=write.interval.app_id)


def moved_computations_are_fenced(request: CommitRequest, snapshot: Snapshot) -> None:
    """Require a fence of all intervals of a computation whose rows move or go, and an unused name for moved rows."""
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
    """Require that added files are new, lie in their interval and were written under the request's fence."""
    for write in request.writes:
        for file in write.added:
            low, high, interval = file.min_key, file.max_key, write.interval
            if low > high or not (interval.contains(low) and interval.contains(high)):
                raise InternalError("a file lies in its interval", path=file.path)
            if (file.sequencer, file.commit_number) != (write.fence.sequencer, write.fence.commit_number):
                raise InternalError("a file was written for this commit", path=file.path, fence=write.fence)
            if snapshot.file(file.path) is not None:
                raise InternalError("an added file is new", path=file.path)


INVARIANTS: Final[tuple[Predicate, ...]] = (
    request_is_whole,
    fences_are_sound,
    files_are_the_writers,
    positions_are_fenced,
    moved_computations_are_fenced,
)
"""Facts that hold for every request, unless Millpond has a bug."""

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

    `FencedError` and `ConflictError` come from other writers, `InvalidError` and `InternalError` from the caller.
    """
    for predicate in (*RULES, *INVARIANTS):
        predicate(request, snapshot)
