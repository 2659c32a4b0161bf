"""The log writer: the only way to make a table's next version, for every kind of commit.

A commit has three outcomes: done, not done, unknown. Putting the *same bytes* at the *same version* again is safe,
because at most one of all attempts lands. So the writer retries after a failure and, when the version is taken, reads the
file to see whose commit it is. A commit of unknown outcome is resolved before anything else is written.

A cleanup of the log frees old versions again, and a writer that slept through it could win one that no reader looks at. So a
cleanup publishes a boundary before it deletes, writers check it after each put, and a commit below it does not count.
It announces the boundary to the lease service as well, which a store's writer asks where the store takes a request.
A sink's writer need not check while it follows itself, because cleanups of its table keep the version that it takes next.
This relies on no clock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Final, Protocol, TypeVar

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    MillpondError,
    ObjectExistsError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.failpoint import FAILPOINTS as ALL_FAILPOINTS
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, JsonValue, Remove, Txn
from millpond.statestore.log.commit_file import digest_of, encode
from millpond.statestore.log.features import Use
from millpond.statestore.log.high_water import HighWater
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot, load
from millpond.statestore.objects.ranges import ParallelObjects, publish_version, published_version
from millpond.statestore.system import RetryPolicy, collector_paused, retrying
from millpond.statestore.types import Clock, Objects, Rng, TableVersion

_Result = TypeVar("_Result")

_TRUSTED_US: Final = 10_000_000
"""How long an observed version is assumed to exist still; log cleanups keep commits for longer."""

FAILPOINTS: Final = tuple(name for name in ALL_FAILPOINTS if name.startswith("commit."))
"""The names with which a writer calls its ``failpoints``."""

BOUNDARY_FOLDER: Final = "_millpond/log_boundary"
_BOUNDARY_TEXT: Final = b"Commits below this version may be deleted; nothing that is put below it counts.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    version: TableVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft:
    """The commit that a plan makes on a given snapshot.

    ``actions`` leaves out the ``commitInfo``, in which ``fields`` becomes Millpond's own part. ``operation``,
    ``parameters`` and ``rows`` (the number of rows in added files) are for the table's history.
    """

    operation: str
    actions: tuple[Action, ...]
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


class Plan(Protocol):
    """The content of a commit, whatever version it will make. Equal plans ask for the same commit."""

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        """Return the commit on this snapshot, or ``None`` when the table already holds it; raise to refuse it."""

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Raise if another writer's commit rules this one out."""


def log_boundary(objects: Objects) -> TableVersion:
    """Return the version below which commit files may be deleted; 0 before the first cleanup."""
    return published_version(objects, BOUNDARY_FOLDER)


def publish_log_boundary(objects: Objects, version: TableVersion) -> None:
    """Announce that commits below ``version`` may be deleted, before the first deletion; it never falls."""
    publish_version(objects, BOUNDARY_FOLDER, version, _BOUNDARY_TEXT)


class _Outcome(Enum):
    UNKNOWN = auto()
    DONE = auto()
    NOT_DONE = auto()


@dataclass(slots=True, kw_only=True, eq=False)
class _Attempt:
    plan: Plan
    version: TableVersion
    data: bytes
    digest: str
    actions: tuple[Action, ...]
    outcome: _Outcome = _Outcome.UNKNOWN

    @property
    def app_ids(self) -> frozenset[str]:
        return frozenset(action.app_id for action in self.actions if isinstance(action, Txn))

    @property
    def committed(self) -> Committed | None:
        done = self.outcome is _Outcome.DONE
        return Committed(version=self.version, digest=self.digest) if done else None


class LogWriter:
    """Commits to one table, and its snapshot at the last version that this writer has read or written.

    Calls exclude one another, so threads may share a writer; between calls the snapshot may change under a thread
    that reads it. The high-water mark is advanced to every version that is written or read. ``failpoints`` is called with each
    name of `FAILPOINTS`; by default it is the process-wide listener.
    """

    def __init__(
        self,
        log: Log,
        snapshot: Snapshot,
        clock: Clock,
        rng: Rng,
        *,
        writer_id: str | None = None,
        retry: RetryPolicy | None = None,
        high_water: HighWater | None = None,
        failpoints: Callable[[str], None] | None = None,
        seen_us: int | None = None,  # when the snapshot was read, by the monotonic clock; by default now
    ) -> None:
        self.snapshot: Snapshot = snapshot
        self.writer_id: str = writer_id or rng.token()
        self._log = log
        self._clock = clock
        self._rng = rng
        self._retry = retry or RetryPolicy()
        self._high_water = high_water
        self._failpoint = failpoints or reach
        # The commits that were read or written since someone asked for them; ``None`` while nobody does.
        self.applied: deque[tuple[TableVersion, tuple[Action, ...]]] | None = None
        self._lock = threading.RLock()
        self._is_far = isinstance(log.objects, ParallelObjects)
        self._is_alone = True
        # True for a table whose cleanups keep the commit after the last one of each transaction; see `collect_log`.
        self.successors_kept: bool = False
        # The last commit of this writer that is known to count, and its transactions.
        self._counted: tuple[TableVersion, frozenset[str]] = (NO_TABLE, frozenset())
        # The newest commits, one after the other, for whoever writes a checkpoint.
        self.recent: deque[tuple[TableVersion, bytes]] = deque(maxlen=0)
        self._in_flight: _Attempt | None = None
        self._unknown: _Attempt | None = None
        # When the version of the snapshot was seen to exist, by the monotonic clock.
        self.seen_us: int = clock.monotonic_us() if seen_us is None else seen_us
        if snapshot.version != NO_TABLE:
            self._retrying(partial(log.sync, snapshot.version))

    def known(self) -> Snapshot:
        """Return the snapshot to build on: as it is if no other writer is likely to have moved on, otherwise the newest."""
        with self._lock:
            return self.refresh() if self._needs_look() else self.snapshot

    def _needs_look(self) -> bool:
        return self.snapshot.version == NO_TABLE or not self._is_alone or self._may_be_stale()

    def refresh(self) -> Snapshot:
        """Follow the log to its newest version."""
        with self._lock:
            before = self.snapshot.version
            for version, data, _actions in self._follow():
                self._recognise(version, data)
            self._is_alone = self.snapshot.version == before
            # A refresh reads the next version by name, so a log that was cleaned up while this writer slept looks
            # like a log without news. After a long sleep, check that the writer's own version still exists.
            if self._may_be_stale() and not self._retrying(self._is_there):
                self._reload_past_cleanup()
            return self.snapshot

    def _follow(self) -> Iterator[tuple[TableVersion, bytes, tuple[Action, ...]]]:
        """Apply new commits one by one; yield the version, bytes and actions of each."""
        while True:
            started_us = self._clock.monotonic_us()
            version = TableVersion(self.snapshot.version + 1)
            data = self._retrying(partial(self._log.read, version))
            if data is None:
                return
            # Commits, the high-water mark and sinks build on this version, so it must survive a power cut; its
            # writer may have died before it synced the commit.
            self._retrying(partial(self._log.sync, version))
            try:
                actions = self.snapshot.apply(version, data)
            except DataError:
                # What another writer that slept has put into the part that was cleaned up is no part of the table.
                if version > self._retrying(partial(log_boundary, self._log.objects)):
                    raise
                self._reload_past_cleanup()
                return
            self.recent.append((version, data))
            self._moved(started_us)
            self._record(version, actions)
            yield version, data, actions

    def _may_be_stale(self) -> bool:
        slept_us = self._clock.monotonic_us() - self.seen_us
        return slept_us > _TRUSTED_US and self.snapshot.version != NO_TABLE

    def _is_there(self) -> bool:
        started_us = self._clock.monotonic_us()
        there = self._log.read(self.snapshot.version) is not None
        if there:
            self.seen_us = started_us
        return there

    def _reload_past_cleanup(self) -> None:
        self._reload()
        attempt = self._in_flight
        if attempt is not None and attempt.version <= self.snapshot.version:
            self._recognise(attempt.version, self._log.read(attempt.version))

    def _reload(self) -> None:
        """Load the table again; raise `DataError` if the log ends before the version that was read earlier."""
        started_us = self._clock.monotonic_us()
        fresh = self._retrying(partial(load, self._log))
        if fresh.version < self.snapshot.version:
            self._log.require(self.snapshot.version)
        self._retrying(partial(self._log.sync, fresh.version))
        self.snapshot = fresh
        self.recent.clear()
        self._moved(started_us)
        self.applied = None

    def _record(self, version: TableVersion, actions: tuple[Action, ...]) -> None:
        if self.applied is not None:
            self.applied.append((version, actions))

    def _moved(self, seen_us: int) -> None:
        self.seen_us = seen_us
        if self._high_water is not None:
            self._high_water.advance(self.snapshot.version, self.snapshot.digest)

    def _retrying(self, action: Callable[[], _Result]) -> _Result:
        return retrying(action, self._retry, self._clock, self._rng)

    def write(self, plan: Plan) -> Committed | None:
        """Make the plan the next version of the table; return ``None`` when the table already holds it.

        Raises:
            OutcomeUnknownError: it may or may not have landed: call `resolve`, or write the same plan again.
            ConflictError: other writers kept coming first, or the plan refused the commit.
            FencedError: the plan refused the commit.
            UnavailableError: the store is unavailable; nothing was written.
        """
        with self._lock:
            # An earlier commit may still land, so it is resolved first: the new one must be built on top of it.
            if self._in_flight is not None:
                self._resolve_earlier(plan)
            repeated = self._unknown if self._unknown is not None and self._unknown.plan == plan else None
            # The put itself finds out if another writer was faster. Only where that is likely a look comes first.
            is_fresh = repeated is not None or self._needs_look()
            if is_fresh:
                self.refresh()
            if repeated is not None:
                if repeated.committed:
                    return repeated.committed
                self._refuse_to_repeat(repeated)
            return self._write(plan, is_fresh=is_fresh)

    def resolve(self) -> Committed | None:
        """Return the last commit that ended in `OutcomeUnknownError` if it is part of the table, or ``None`` if it never will be.

        Raises:
            OutcomeUnknownError: the outcome cannot be read yet, or never will: the log was cleaned up since.
        """
        with self._lock:
            if self._in_flight is not None:
                self._unknown = self._in_flight
                # A ConflictError means that the log was cleaned up past the attempt, which decides its outcome.
                with contextlib.suppress(ConflictError):
                    self._land(self._in_flight)
            if self._unknown is not None and self._unknown.outcome is _Outcome.UNKNOWN:
                raise _lost_in_cleanup(self._unknown)
            return None if self._unknown is None else self._unknown.committed

    def _resolve_earlier(self, plan: Plan) -> None:
        try:
            self.resolve()
        except OutcomeUnknownError as error:
            if self._in_flight is not None and self._in_flight.plan == plan:
                raise
            raise UnavailableError("an earlier commit is not settled yet; nothing was written") from error

    def _refuse_to_repeat(self, attempt: _Attempt) -> None:
        # If the attempt did land, a repetition must collide with its transactions; without any it would count twice.
        is_guarded = any(isinstance(action, Txn) for action in attempt.actions)
        if attempt.outcome is _Outcome.UNKNOWN and not is_guarded:
            raise _lost_in_cleanup(attempt)

    def _write(self, plan: Plan, *, is_fresh: bool) -> Committed | None:
        for _ in range(self._retry.versions_max):
            try:
                attempt = self._build(plan)
            except MillpondError:
                if is_fresh:
                    raise
                attempt = None
            if attempt is not None:
                self._land(attempt)
                if attempt.outcome is _Outcome.DONE:
                    return attempt.committed
                self._is_alone = False
            elif is_fresh:
                return None
            if is_fresh:
                for _version, _data, winner in self._follow():
                    plan.admit(winner)
            else:
                # Commits from before this call: they need not be admitted, and what was refused on an older version
                # may be right on this one.
                self.refresh()
                is_fresh = True
        raise ConflictError("other writers came first too often", versions=self._retry.versions_max)

    def _build(self, plan: Plan) -> _Attempt | None:
        # Rules are checked in `build`, on the very snapshot whose next version the attempt will take. The put is
        # conditional on that version, so no other commit can slip in between check and commit.
        with collector_paused():
            now_ms = self._clock.now_us() // 1_000
            draft = plan.build(self.snapshot, now_ms)
            return None if draft is None else self._prepare(plan, draft, now_ms)

    def _prepare(self, plan: Plan, draft: CommitDraft, now_ms: int) -> _Attempt:
        # On the very version that the commit is built on: another engine may have changed the table since it was opened.
        if self.snapshot.duties:
            self.snapshot.refuse(Use.REWRITE if _rewrites(draft) else Use.APPEND, self._log.objects.url)
        actions = (_commit_info(draft, self.snapshot, self.writer_id, now_ms), *draft.actions)
        data = encode(actions)
        return _Attempt(
            plan=plan,
            version=TableVersion(self.snapshot.version + 1),
            data=data,
            digest=digest_of(data),
            actions=actions,
        )

    def _land(self, attempt: _Attempt) -> None:
        """Put the attempt and set its outcome, or keep it and raise `OutcomeUnknownError`."""
        self._in_flight = attempt
        try:
            self._retrying(partial(self._put, attempt))
        except UnavailableError as error:
            self._unknown = attempt
            self._failpoint("commit.outcome_unknown")
            raise OutcomeUnknownError(
                "the commit may or may not have landed: settle it, or start again, which does",
                path=commit_path(attempt.version),
                cause=error,
            ) from error
        self._in_flight = None

    def _put(self, attempt: _Attempt) -> None:
        self._failpoint("commit.before_put")
        started_us = self._clock.monotonic_us()
        try:
            self._log.put(attempt.version, attempt.data)
        except ObjectExistsError:
            self._failpoint("commit.version_taken")
            self._read_back(attempt)
            return
        except UnavailableError:
            # The reply may be lost and the commit landed, so the retry puts the same bytes at the same version.
            self._failpoint("commit.put_failed")
            raise
        self._failpoint("commit.after_put")
        self._accept(attempt, started_us)

    def _read_back(self, attempt: _Attempt) -> None:
        # "Taken" may mean taken by an earlier try of this very attempt: only the bytes tell whose commit it is.
        started_us = self._clock.monotonic_us()
        data = self._log.read(attempt.version)
        if data is None:
            raise UnavailableError("a taken version cannot be read", path=commit_path(attempt.version))
        if data == attempt.data:
            self._accept(attempt, started_us)
        else:
            attempt.outcome = _Outcome.NOT_DONE

    def _accept(self, attempt: _Attempt, started_us: int) -> None:
        """Count a landed attempt, unless a cleanup has passed its version."""
        if self._was_passed(attempt):
            # The log was cleaned up past this writer while it slept. If it slept before its put, the put went
            # to a part that no reader looks at; if after it, its commit was cleaned up with the others.
            self._reload()
            attempt.outcome, self._in_flight = self._outcome_from_txns(attempt), None
            if attempt.outcome is _Outcome.NOT_DONE:
                raise ConflictError("the log was cleaned up past this writer; nothing was committed")
            self._unknown = attempt
            if attempt.outcome is _Outcome.UNKNOWN:
                raise _lost_in_cleanup(attempt)
            self._failpoint("commit.done")
            return
        self._failpoint("commit.before_apply")
        if self.snapshot.version < attempt.version:
            self.snapshot.apply_actions(attempt.version, attempt.actions, attempt.digest)
            self.recent.append((attempt.version, attempt.data))
            self._moved(started_us)
            self._record(attempt.version, attempt.actions)
        attempt.outcome = _Outcome.DONE
        self._counted = attempt.version, attempt.app_ids
        self._failpoint("commit.done")

    def _was_passed(self, attempt: _Attempt) -> bool:
        version = attempt.version
        # Checked after the put: a cleanup publishes its boundary before it deletes, so a put into a freed version
        # always finds the boundary above itself.
        if not self._takes_kept_version(attempt) and version < self._boundary_after(attempt):
            return True
        # Other engines clean up without a boundary, behind a checkpoint.
        if not self._may_be_stale() or self._is_there():
            return False
        checkpoints = self._log.inventory().checkpoints
        newest = max((checkpoint.version for checkpoint in checkpoints), default=NO_TABLE)
        if newest < self.snapshot.version:
            self._log.require(self.snapshot.version)
        return newest >= version

    def _boundary_after(self, attempt: _Attempt) -> TableVersion:
        # The service knows each cleanup since it was connected, and this writer's last commit is newer than that. A
        # clock is not needed; it only narrows what cleanups of earlier versions, which tell the service nothing, can do.
        follows_itself = self._counted[0] == attempt.version - 1 and not self._may_be_stale()
        if self._high_water is not None and self._is_far and follows_itself:
            announced = self._high_water.boundary()
            if announced is not None:
                return announced
        return log_boundary(self._log.objects)

    def _takes_kept_version(self, attempt: _Attempt) -> bool:
        # The version follows a commit of this writer that counts and moved the same transaction. If another writer had
        # taken the version, a cleanup would have kept that commit, and the put would have found it.
        before, app_ids = self._counted
        return (
            self.successors_kept and before == attempt.version - 1 and not app_ids.isdisjoint(attempt.app_ids)
        )

    def _outcome_from_txns(self, attempt: _Attempt) -> _Outcome:
        """Return the outcome of a commit whose file is gone or no longer counts, from a reloaded table's transactions.

        Transactions never fall, and a fence belongs to one commit of one owner. A missing one tells nothing where a
        checkpoint may have forgotten it.
        """
        txns = self.snapshot.txns
        own = [(action, txns.get(action.app_id)) for action in attempt.actions if isinstance(action, Txn)]
        if any(
            not self._may_be_forgotten(txn.app_id) if now is None else now < txn.version for txn, now in own
        ):
            return _Outcome.NOT_DONE
        fences = [pair for pair in own if Interval.from_app_id(pair[0].app_id) is not None]
        if any(now == txn.version for txn, now in fences) or (
            own and not fences and all(now == txn.version for txn, now in own)
        ):
            return _Outcome.DONE
        return _Outcome.UNKNOWN

    def _may_be_forgotten(self, app_id: str) -> bool:
        interval = Interval.from_app_id(app_id)
        if interval is None:
            return app_id.startswith(AppId.SAVEPOINT)
        return any(interval.overlaps(other) for other in self.snapshot.live_intervals(interval.computation))

    def _recognise(self, version: TableVersion, data: bytes | None) -> None:
        """Decide a commit of unknown outcome when the followed log shows what its version holds."""
        attempt = self._in_flight
        if attempt is None or attempt.version != version:
            return
        if data is None:
            attempt.outcome = self._outcome_from_txns(attempt)
        elif data != attempt.data:
            attempt.outcome = _Outcome.NOT_DONE
        elif version < self._retrying(partial(log_boundary, self._log.objects)):
            # The file lies in the part that was cleaned up, and this writer has followed the log into that part.
            self._reload()
            attempt.outcome = self._outcome_from_txns(attempt)
        else:
            attempt.outcome = _Outcome.DONE
        self._unknown, self._in_flight = attempt, None


def _rewrites(draft: CommitDraft) -> bool:
    return any(isinstance(action, Remove) and action.data_change for action in draft.actions)


def _lost_in_cleanup(attempt: _Attempt) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        "the log was cleaned up past this writer: whether its commit had landed is no longer known; "
        "start again",
        path=commit_path(attempt.version),
    )


def _commit_info(draft: CommitDraft, snapshot: Snapshot, writer_id: str, now_ms: int) -> CommitInfo:
    added = removed = added_bytes = 0
    for action in draft.actions:
        if isinstance(action, Add):
            added += 1
            added_bytes += action.size_bytes
        elif isinstance(action, Remove):
            removed += 1
    return CommitInfo(
        operation=draft.operation,
        timestamp_ms=now_ms,
        parameters=draft.parameters,
        metrics={
            "numFiles": str(added),
            "numOutputRows": str(draft.rows),
            "numOutputBytes": str(added_bytes),
            "numRemovedFiles": str(removed),
        },
        is_blind_append=bool(added) and removed == 0,
        read_version=None if snapshot.version == NO_TABLE else snapshot.version,
        # The digest of the commit before this one chains the log, so a swapped or rolled back file shows.
        millpond={**draft.fields, "writer": writer_id, "previous": snapshot.digest},
    )
