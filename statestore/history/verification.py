"""Verification of a whole store: the log, its checkpoints, every live file, and the high-water mark.

It changes nothing, and continues after a damaged file to report all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import DataError, InvalidError, MillpondError
from millpond.statestore.history.replayed_log import LoggedCommit, read_commit, readable_commits, replay_log
from millpond.statestore.history.savepoint import Savepoint, open_savepoints
from millpond.statestore.interval import Interval
from millpond.statestore.log.features import Use
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.high_water import Mark, check_high_water
from millpond.statestore.log.log import Log, commit_path, foreign_change
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import FORMAT_VERSION, FORMAT_VERSION_KEY
from millpond.statestore.log.writer import log_boundary
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.row import unpack_fence
from millpond.statestore.types import Objects, TableVersion

_COLUMNS: Final = ("key", "sequencer", "commit_number", "superstep")
# More missing commits are counted, not named.
_MISSING_MAX: Final = 1_000
_RISING_PREFIXES: Final = (AppId.INPUT, AppId.SUPERSTEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault: the file's path in the table, its contents according to the log, and the fault."""

    path: str
    held: str
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a verification: counts of the files read and of their row updates (``rows``), and the faults."""

    commits: int
    checkpoints: int
    files: int
    rows: int
    findings: tuple[Finding, ...]


def verify_store(
    objects: Objects, mark: Mark | None = None, *, on_progress: Callable[[int, int], None] = lambda *_: None
) -> Verified:
    """Read a whole store and report every fault; ``mark`` is the high-water mark, read before, if it is known."""
    log = Log(objects)
    inventory = log.inventory()
    # Commits below the boundary are garbage: a killed cleanup left them, or a late writer put them there.
    boundary = log_boundary(objects)
    versions = tuple(version for version in inventory.versions if version >= boundary)
    findings = list(_check_commits(log, versions, inventory.latest))
    for checkpoint in inventory.checkpoints:
        try:
            Snapshot().restart_from(checkpoint, log.read_checkpoint(checkpoint), None)
        except MillpondError as error:
            held = f"the sum of the log up to version {checkpoint.version}"
            findings.append(Finding(path=checkpoint.paths[0], held=held, fault=error.message))
    files, rows = 0, 0
    try:
        snapshot = load(log, use=None)
        check_high_water(mark, snapshot, log)
    except (DataError, InvalidError) as error:
        path = str(error.details.get("path", commit_path(inventory.latest or 0)))
        if all(finding.path != path for finding in findings):
            findings.append(Finding(path=path, held="the table's newest version", fault=str(error)))
    else:
        findings += _check_features(snapshot, objects.url)
        findings += _check_savepoints(log, open_savepoints(snapshot.txns), versions)
        for file in snapshot.files:
            files += 1
            rows += file.num_records or 0
            findings += _check_file(objects, snapshot, file)
            on_progress(files, snapshot.file_count)
    return Verified(
        commits=len(versions),
        checkpoints=len(inventory.checkpoints),
        files=files,
        rows=rows,
        findings=tuple(findings),
    )


def _check_commits(
    log: Log, versions: tuple[TableVersion, ...], latest: TableVersion | None
) -> Iterator[Finding]:
    if latest is None:
        yield Finding(path=commit_path(0), held="the table", fault="there is no commit at all")
        return
    before, txns = "", dict[str, int]()
    numbers: Sequence[int] = range(versions[0] if versions else latest, latest + 1)
    if len(numbers) - len(versions) > _MISSING_MAX:
        # A name alone makes a gap of any size.
        fault = f"{len(numbers) - len(versions)} commit files before it are missing"
        yield Finding(path=commit_path(latest), held="the log", fault=fault)
        numbers = versions
    for number in numbers:
        version = TableVersion(number)
        held, missing = f"table version {version}", "the commit file is missing"
        try:
            commit = read_commit(log, version)
        except DataError as error:
            commit, missing = None, error.message
        if commit is None:
            yield Finding(path=commit_path(version), held=held, fault=missing)
            # Nothing is known of the next commit's predecessor, so the chain is checked again from there.
            before, txns = "", {}
            continue
        for fault in _faults_of(commit, before, txns):
            yield Finding(path=commit_path(version), held=held, fault=fault)
        txns |= commit.txns
        before = commit.digest


def _faults_of(commit: LoggedCommit, before: str, txns: dict[str, int]) -> Iterator[str]:
    info = foreign_change(commit.actions, {FORMAT_VERSION_KEY: str(FORMAT_VERSION)})
    if info is not None:
        yield f"another engine changed data by it: {info.operation or 'an unknown operation'} by {info.engine_info}"
    if not commit.is_sealed:
        return
    if commit.previous and before and commit.previous != before:
        yield "it was not built on the commit before it"
    for app_id, at in commit.txns.items():
        stored = txns.get(app_id)
        if stored is None:
            continue
        if Interval.from_app_id(app_id) is not None:
            if not unpack_fence(at).follows(unpack_fence(stored)):
                yield f"a fence is out of order: {app_id} from {stored} to {at}"
        elif commit.kind in ("repair", "rewind"):
            # A repair restores old positions together with their rows.
            continue
        elif app_id.startswith(_RISING_PREFIXES) and at < stored:
            yield f"a position fell: {app_id} from {stored} to {at}"


def _check_features(snapshot: Snapshot, url: str) -> Iterator[Finding]:
    try:
        snapshot.refuse(Use.REWRITE, url)
    except InvalidError as error:
        yield Finding(path=commit_path(snapshot.formed_at), held="the table's features", fault=str(error))


def _check_savepoints(
    log: Log, savepoints: Iterable[Savepoint], versions: Sequence[TableVersion]
) -> Iterator[Finding]:
    """Find savepoints whose files another engine has vacuumed, which knows nothing of savepoints."""
    listed = frozenset(log.objects.list("")) if savepoints else frozenset()
    for savepoint in savepoints:
        try:
            missing = sorted(replay_log(log, savepoint.version).adds.keys() - listed)
        except DataError:
            # Reported above: the log or a checkpoint is damaged.
            continue
        # Without a VACUUM it is the rest of a savepoint that was made too late, which the next attempt drops.
        vacuum = _last_vacuum(log, versions, savepoint.version) if missing else None
        if vacuum is not None:
            engine = "another engine" if vacuum.info is None else vacuum.info.engine_info or "another engine"
            fault = (
                f"{len(missing)} of its files are missing, and {engine} has vacuumed in version {vacuum.version}: drop it "
                f"(`millpond savepoint STORE {savepoint.name!r} --drop`)"
            )
            yield Finding(
                path=missing[0],
                held=f"savepoint {savepoint.name!r}, version {savepoint.version}",
                fault=fault,
            )


def _last_vacuum(log: Log, versions: Sequence[TableVersion], since: TableVersion) -> LoggedCommit | None:
    later = [version for version in reversed(versions) if version > since]
    for commit in readable_commits(log, later):
        if commit.info is not None and commit.info.operation.startswith("VACUUM") and not commit.is_sealed:
            return commit
    return None


def _check_file(objects: Objects, snapshot: Snapshot, file: LiveFile) -> Iterator[Finding]:
    keys = f"keys {file.min_key!r} to {file.max_key!r}"
    held = f"{file.num_records} row updates of {file.computation}, {keys}, superstep {file.max_superstep}"
    try:
        rows = read_row_files(objects, [file.path])
    except DataError as error:
        reason = error.details.get("reason")
        fault = error.message if reason is None else f"{error.message}: {reason}"
        yield Finding(path=file.path, held=held, fault=fault)
        return
    for fault in _faults_of_rows(rows.select(_COLUMNS), snapshot, file):
        yield Finding(path=file.path, held=held, fault=fault)


def _faults_of_rows(rows: pa.Table, snapshot: Snapshot, file: LiveFile) -> Iterator[str]:
    if file.num_records is not None and rows.num_rows != file.num_records:
        yield f"it has {rows.num_rows} rows, the log says {file.num_records}"
    if not rows.num_rows:
        return
    bounds = pc.min_max(rows.column("key")).as_py()
    low, high = bounds["min"], bounds["max"]
    if (file.min_key is not None and low < file.min_key) or (
        file.max_key is not None and high > file.max_key
    ):
        yield "it has keys outside the range that the log says"
    interval = Interval.from_app_id(file.interval_id)
    if interval is None:
        return
    keys = rows.column("key")
    if not pc.all(pc.less(keys.slice(0, rows.num_rows - 1), keys.slice(1)), min_count=0).as_py():
        yield "its keys do not rise"
    if not (interval.contains(low) and interval.contains(high)):
        yield "it has keys outside its interval"
    stored = snapshot.fence_of(interval)
    newest = max(
        zip(rows.column("sequencer").to_pylist(), rows.column("commit_number").to_pylist(), strict=True)
    )
    if stored is not None and newest > (stored.sequencer, stored.commit_number):
        yield "it has rows newer than its interval's last commit"
    last = file.tags.get("superstep", "")
    if last.isdecimal() and pc.max(rows.column("superstep")).as_py() > int(last):
        yield "it has rows of a later superstep than it was written in"
