"""The log writer: the only way to make a table's next version, for every kind of commit.

A commit has three outcomes: done, not done, unknown. Putting the *same bytes* at
the *same version* again is safe, because at most one of all attempts lands; so after a
failure the writer tries again and, when the version turns out to be taken,
reads the file to see whose commit it is. A commit whose outcome stays unknown is kept, and
settled before anything else is written. When another writer took the version, the plan
decides whether that is a conflict; if not, it is rebuilt on the newer snapshot.

A commit's `Plan` decides what it contains and when it is refused:
`millpond.statestore.log.committer`, `millpond.statestore.log.table`, `millpond.statestore.log.table`.

Plans: the content of a commit, separate from the protocol that makes it.

The boundary of the log: commit files below it may be deleted, and puts below it do not count.

A writer wins a version by putting its commit file where there is none. A cleanup deletes commit
files, and so frees old versions again: a writer that slept through the cleanup would win a version
that all others have passed, in a part of the log that no reader looks at. So a cleanup publishes
its boundary before it deletes, and every writer checks the boundary after its put: a file below it
is no commit. This relies on no clock.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from millpond.statestore.errors import (
    ConflictError,
    InvalidError,
    ObjectExistsError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.failpoint import FAILPOINTS as ALL_FAILPOINTS
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, Remove, Txn
from millpond.statestore.log.commit_file import digest_of, encode
from millpond.statestore.log.follower import LogFollower
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import NO_TABLE, Snapshot
from millpond.statestore.objects.ranges import publish_version, published_version
from millpond.statestore.system import RetryPolicy, collector_paused
from millpond.statestore.types import Clock, Rng, TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from millpond.statestore.log.action import JsonValue
    from millpond.statestore.log.high_water import HighWater
    from millpond.statestore.types import Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A commit that is part of the table: the version that it made, and its file's SHA-256."""

    version: TableVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDraft:
    """The commit that a plan makes on a given snapshot.

    Args:
        operation: name of the operation, for the table's history.
        actions: all actions except the ``commitInfo``.
        fields: Millpond's own part of the ``commitInfo``.
        parameters: parameters of the operation, for the table's history.
        rows: how many rows the added files hold, for the table's history.
    """

    operation: str
    actions: tuple[Action, ...]
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    rows: int = 0


class Plan(Protocol):
    """The content of a commit, independent of the table version that it will make.

    Equal plans ask for the same commit.
    """

    def build(self, snapshot: Snapshot, now_ms: int) -> CommitDraft | None:
        """The commit on this snapshot; ``None`` when the table already holds it.

        Raises:
            MillpondError: the snapshot forbids it.
        """
        ...

    def admit(self, winner: tuple[Action, ...]) -> None:
        """Check whether the plan is still valid after another writer's commit.

        Raises:
            MillpondError: that commit rules this one out.
        """
        ...


BOUNDARY_FOLDER: Final = "_millpond/log_boundary"

_SAYS: Final = b"Commits below this version may be deleted; nothing that is put below it counts.\n"


def log_boundary(objects: Objects) -> TableVersion:
    """The version below which commit files may be deleted; 0 before the first cleanup.

    Raises:
        UnavailableError: the store is unavailable.
    """
    return published_version(objects, BOUNDARY_FOLDER)


def publish_log_boundary(objects: Objects, version: TableVersion) -> None:
    """Announce that commits below ``version`` may be deleted; call it before the first deletion.

    A boundary lower than the published one changes nothing.

    Raises:
        UnavailableError: the store is unavailable; the boundary may or may not be published.
    """
    publish_version(objects, BOUNDARY_FOLDER, version, _SAYS)


_WRITER_VERSION_MAX: Final = 2

FAILPOINTS: Final = tuple(name for name in ALL_FAILPOINTS if name.startswith("commit."))
"""Names of the failpoints of a commit, with which the ``failpoints`` seam is called."""


class _AttemptOutcome(Enum):
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
    outcome: _AttemptOutcome = _AttemptOutcome.UNKNOWN

    @property
    def committed(self) -> Committed | None:
        done = self.outcome is _AttemptOutcome.DONE
        return Committed(version=self.version, digest=self.digest) if done else None


class LogWriter:
    """Writes commits to one table and keeps its snapshot.

    Calls exclude one another, so several threads may share it; between calls the snapshot
    may change under a thread that reads it.

    Args:
        log: the table's log.
        snapshot: the snapshot to start from.
        clock: for timestamps and waiting.
        rng: for jitter and the writer's id.
        writer_id: names the writer in its commits; drawn at random if not given.
        retry: the policy for retries.
        high_water: advanced to every version that is written or read.
        failpoints: called with each name of `FAILPOINTS`; the process-wide listener by default.
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
    ) -> None:
        self._log = log
        self._clock = clock
        self._writer_id = writer_id or rng.token()
        self._retry = retry or RetryPolicy()
        self._follower = LogFollower(log, snapshot, clock, rng, retry=self._retry, high_water=high_water)
        self._failpoint = failpoints or reach
        self._lock = threading.RLock()
        self._in_flight: _Attempt | None = None
        self._unknown: _Attempt | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The table at the last version that this writer has read or written."""
        return self._follower.snapshot

    @property
    def writer_id(self) -> str:
        """The name under which this writer commits."""
        return self._writer_id

    def refresh(self) -> Snapshot:
        """Follow the log to its newest version.

        Raises:
            DataError: a commit is damaged or missing.
            UnavailableError: the store is unavailable.
        """
        with self._lock:
            for version, data, _actions in self._follower.follow():
                self._recognise(version, data)
            if self._follower.may_be_stale() and self._follower.reload_if_missing():
                self._recognise_after_reload()
            return self.snapshot

    def write(self, plan: Plan) -> Committed | None:
        """Make the plan the next version of the table.

        Returns:
            The commit; ``None`` when the table already holds it.

        Raises:
            OutcomeUnknownError: it may or may not have landed: call `settle`, or write the same plan again.
            ConflictError: other writers kept coming first, or the plan refused the commit.
            FencedError: the plan refused the commit.
            UnavailableError: the store is unavailable; nothing was written.
        """
        with self._lock:
            if self._in_flight is not None:
                self._settle_earlier(plan)
            self.refresh()
            if self._unknown is not None and self._unknown.plan == plan:
                if self._unknown.committed:
                    return self._unknown.committed
                self._refuse_to_repeat(self._unknown)
            return self._write(plan)

    def settle(self) -> Committed | None:
        """Decide the outcome of the last commit that ended in `OutcomeUnknownError`.

        Returns:
            The commit if it is part of the table now; ``None`` if it never will be, or if there was none.

        Raises:
            OutcomeUnknownError: the outcome still cannot be read, or never will: the log was cleaned up since.
        """
        with self._lock:
            if self._in_flight is not None:
                self._unknown = self._in_flight
                # In a part of the log that was cleaned up it is no commit, which settles it.
                with contextlib.suppress(ConflictError):
                    self._land(self._in_flight)
            if self._unknown is not None and self._unknown.outcome is _AttemptOutcome.UNKNOWN:
                raise _lost_in_cleanup(self._unknown)
            return None if self._unknown is None else self._unknown.committed

    def _refuse_to_repeat(self, attempt: _Attempt) -> None:
        """Refuse to repeat a commit whose outcome can no longer be determined, unless its transactions guard it."""
        is_guarded = any(isinstance(action, Txn) for action in attempt.actions)
        if attempt.outcome is _AttemptOutcome.UNKNOWN and not is_guarded:
            raise _lost_in_cleanup(attempt)

    def _settle_earlier(self, plan: Plan) -> None:
        try:
            self.settle()
        except OutcomeUnknownError as error:
            if self._in_flight is not None and self._in_flight.plan == plan:
                raise
            raise UnavailableError("an earlier commit is not settled yet; nothing was written") from error

    def _write(self, plan: Plan) -> Committed | None:
        for _ in range(self._retry.versions_max):
            draft = plan.build(self.snapshot, self._clock.now_us() // 1_000)
            if draft is None:
                return None
            attempt = self._prepare(plan, draft)
            self._land(attempt)
            if attempt.outcome is _AttemptOutcome.DONE:
                return attempt.committed
            for _version, _data, winner in self._follower.follow():
                plan.admit(winner)
        raise ConflictError("other writers came first too often", versions=self._retry.versions_max)

    @collector_paused()
    def _prepare(self, plan: Plan, draft: CommitDraft) -> _Attempt:
        _check_writable(self.snapshot)
        now_ms = self._clock.now_us() // 1_000
        info = _commit_info(draft, self.snapshot, self._writer_id, now_ms)
        actions = (info, *draft.actions)
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
            self._follower.retrying(partial(self._put, attempt))
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
            self._failpoint("commit.put_failed")
            raise
        self._failpoint("commit.after_put")
        self._take(attempt, started_us)

    def _read_back(self, attempt: _Attempt) -> None:
        started_us = self._clock.monotonic_us()
        data = self._log.read(attempt.version)
        if data is None:
            raise UnavailableError("a taken version cannot be read", path=commit_path(attempt.version))
        if data == attempt.data:
            self._take(attempt, started_us)
        else:
            attempt.outcome = _AttemptOutcome.NOT_DONE

    def _take(self, attempt: _Attempt, started_us: int) -> None:
        if self._was_passed(attempt.version):
            # The log was cleaned up past this writer while it slept. If it slept before its put, the put went
            # to a part that no reader looks at; if after it, its commit was cleaned up with the others.
            self._follower.reload()
            attempt.outcome, self._in_flight = self._outcome_from_txns(attempt), None
            if attempt.outcome is _AttemptOutcome.NOT_DONE:
                raise ConflictError("the log was cleaned up past this writer; nothing was committed")
            self._unknown = attempt
            if attempt.outcome is _AttemptOutcome.UNKNOWN:
                raise _lost_in_cleanup(attempt)
            self._failpoint("commit.done")
            return
        self._failpoint("commit.before_apply")
        if self.snapshot.version < attempt.version:
            self._follower.take(attempt.version, attempt.actions, attempt.digest, started_us)
        attempt.outcome = _AttemptOutcome.DONE
        self._failpoint("commit.done")

    def _was_passed(self, version: TableVersion) -> bool:
        if version < log_boundary(self._log.objects):
            return True
        return self._follower.may_be_stale() and self._follower.is_before_log_start(version)

    def _outcome_from_txns(self, attempt: _Attempt) -> _AttemptOutcome:
        """The outcome, by a reloaded table's transactions, of a commit whose file is gone or no longer counts.

        Transactions never fall, and a fence belongs to one commit of one owner.
        """
        txns = self.snapshot.txns
        own = [(action, txns.get(action.app_id)) for action in attempt.actions if isinstance(action, Txn)]
        if any(now is None or now < txn.version for txn, now in own):
            return _AttemptOutcome.NOT_DONE
        fences = [pair for pair in own if Interval.from_app_id(pair[0].app_id) is not None]
        if any(now == txn.version for txn, now in fences) or (
            own and not fences and all(now == txn.version for txn, now in own)
        ):
            return _AttemptOutcome.DONE
        return _AttemptOutcome.UNKNOWN

    def _recognise(self, version: TableVersion, data: bytes | None) -> None:
        # While the log is followed, a commit of unknown outcome may appear, or lose its version to another.
        attempt = self._in_flight
        if attempt is None or attempt.version != version:
            return
        if data is None:
            attempt.outcome = self._outcome_from_txns(attempt)
        elif data != attempt.data:
            attempt.outcome = _AttemptOutcome.NOT_DONE
        elif version < self._follower.retrying(partial(log_boundary, self._log.objects)):
            # It lies in the part that was cleaned up, and the follower has followed it there.
            self._follower.reload()
            attempt.outcome = self._outcome_from_txns(attempt)
        else:
            attempt.outcome = _AttemptOutcome.DONE
        self._unknown, self._in_flight = attempt, None

    def _recognise_after_reload(self) -> None:
        attempt = self._in_flight
        if attempt is not None and attempt.version <= self.snapshot.version:
            self._recognise(attempt.version, self._log.read(attempt.version))


def _lost_in_cleanup(attempt: _Attempt) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        "the log was cleaned up past this writer: whether its commit had landed is no longer known; "
        "start again",
        path=commit_path(attempt.version),
    )


def _check_writable(snapshot: Snapshot) -> None:
    if snapshot.protocol.min_writer_version > _WRITER_VERSION_MAX:
        raise InvalidError(
            "the table requires a newer Delta writer than Millpond",
            min_writer_version=snapshot.protocol.min_writer_version,
        )


def _commit_info(draft: CommitDraft, snapshot: Snapshot, writer_id: str, now_ms: int) -> CommitInfo:
    added = [action for action in draft.actions if isinstance(action, Add)]
    removed = sum(isinstance(action, Remove) for action in draft.actions)
    return CommitInfo(
        operation=draft.operation,
        timestamp_ms=now_ms,
        parameters=draft.parameters,
        metrics={
            "numFiles": str(len(added)),
            "numOutputRows": str(draft.rows),
            "numOutputBytes": str(sum(add.size_bytes for add in added)),
            "numRemovedFiles": str(removed),
        },
        is_blind_append=bool(added) and removed == 0,
        read_version=None if snapshot.version == NO_TABLE else snapshot.version,
        millpond={**draft.fields, "writer": writer_id, "previous": snapshot.digest},
    )
