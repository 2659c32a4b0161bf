"""Verification of a whole store, and repair of a single flipped bit.

`verify_store` checks every remaining commit file (seal, digest chain, order of fences and positions), every checkpoint,
every live file (seal, page checksums, agreement with the log) and the high-water mark. It changes nothing, and continues
after a damaged file to report all of them.

A single flipped bit is the most common corruption by disks and memory. A commit's SHA-256 leaves no doubt; a row file's
CRC-32 has a different remainder for every single bit, and page checksums confirm the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import DataError, MillpondError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.checkpoint import Checkpoint
from millpond.statestore.log.commit_file import decode, digest_of
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
    """Read a whole store and report every fault.

    Args:
        objects: the table's root.
        mark: the high-water mark, read before this call; ``None`` when it is not known.
        on_progress: called after each live file, with the number of files read and the total.
    """
    log = Log(objects)
    inventory = log.inventory()
    # Commits below the boundary are garbage: a killed cleanup left them, or a late writer put them there.
    boundary = log_boundary(objects)
    versions = tuple(version for version in inventory.versions if version >= boundary)
    findings = list(_check_commits(log, versions, inventory.latest))
    findings += _check_checkpoints(log, inventory.checkpoints)
    files, rows = 0, 0
    try:
        snapshot = load(log)
        check_high_water(mark, snapshot, log)
    except DataError as error:
        path = str(error.details.get("path", commit_path(inventory.latest or 0)))
        if all(finding.path != path for finding in findings):
            findings.append(Finding(path=path, held="the table's newest version", fault=str(error)))
    else:
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
    for number in range(versions[0] if versions else latest, latest + 1):
        version = TableVersion(number)
        data = log.read(version)
        held = f"table version {version}"
        if data is None:
            yield Finding(path=commit_path(version), held=held, fault="the commit file is missing")
            before, txns = "", {}
            continue
        try:
            actions = decode(data, commit_path(version))
        except DataError as error:
            yield Finding(path=commit_path(version), held=held, fault=error.message)
            before, txns = "", {}
            continue
        for fault in (*_foreign_faults(actions), *_faults_of(actions, before, txns)):
            yield Finding(path=commit_path(version), held=held, fault=fault)
        txns |= {action.app_id: action.version for action in actions if isinstance(action, Txn)}
        before = digest_of(data)


def _foreign_faults(actions: tuple[Action, ...]) -> Iterator[str]:
    info = foreign_change(actions, {FORMAT_VERSION_KEY: str(FORMAT_VERSION)})
    if info is not None:
        yield f"another engine changed data by it: {info.operation or 'an unknown operation'} by {info.engine_info}"


def _faults_of(actions: tuple[Action, ...], before: str, txns: dict[str, int]) -> Iterator[str]:
    infos = [action.millpond for action in actions if isinstance(action, CommitInfo)]
    ours = next((info for info in infos if info is not None), None)
    if ours is None:
        return
    previous = ours.get("previous")
    if previous and before and previous != before:
        yield "it was not built on the commit before it"
    for action in actions:
        if not isinstance(action, Txn) or action.app_id not in txns:
            continue
        stored = txns[action.app_id]
        if Interval.from_app_id(action.app_id) is not None:
            if not unpack_fence(action.version).follows(unpack_fence(stored)):
                yield f"a fence is out of order: {action.app_id} from {stored} to {action.version}"
        elif ours.get("kind") in ("repair", "rewind"):
            # A repair restores old positions together with their rows.
            continue
        elif action.app_id.startswith(_RISING_PREFIXES) and action.version < stored:
            yield f"a position fell: {action.app_id} from {stored} to {action.version}"


def _check_checkpoints(log: Log, checkpoints: tuple[Checkpoint, ...]) -> Iterator[Finding]:
    for checkpoint in checkpoints:
        try:
            fresh = Snapshot()
            fresh.restart_from(checkpoint, log.read_checkpoint(checkpoint), None)
        except MillpondError as error:
            held = f"the sum of the log up to version {checkpoint.version}"
            yield Finding(path=checkpoint.paths[0], held=held, fault=error.message)


def _check_file(objects: Objects, snapshot: Snapshot, file: LiveFile) -> Iterator[Finding]:
    held = _describe(file)
    try:
        rows = read_row_files(objects, [file.path])
    except DataError as error:
        reason = error.details.get("reason")
        fault = error.message if reason is None else f"{error.message}: {reason}"
        yield Finding(path=file.path, held=held, fault=fault)
        return
    for fault in _faults_of_rows(rows.select(_COLUMNS), snapshot, file):
        yield Finding(path=file.path, held=held, fault=fault)


def _describe(file: LiveFile) -> str:
    keys = f"keys {file.min_key!r} to {file.max_key!r}"
    return f"{file.num_records} row updates of {file.computation}, {keys}, superstep {file.max_superstep}"


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


FLIP_BYTES_MAX: Final = 1 << 15
"""Larger files are not tried: each candidate bit costs a check of the whole file."""

_BLOCK_BYTES: Final = 64


def repair_bit_flip(data: bytes, is_whole: Callable[[bytes], bool]) -> bytes | None:
    """Flip each bit until ``is_whole`` accepts the data; return ``None`` if it never does.

    Example:
        >>> repair_bit_flip(b"something else", lambda data: data == b"word")
        >>> repair_bit_flip(b"wnrd", lambda data: data == b"word")
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for index in range(len(trial)):
        for bit in range(8):
            trial[index] ^= 1 << bit
            if is_whole(bytes(trial)):
                return bytes(trial)
            trial[index] ^= 1 << bit
    return None


def repair_bit_flip_by_digest(data: bytes, digest: str) -> bytes | None:
    """Repair data with a known SHA-256; bytes before a candidate bit are hashed once per block.

    Example:
        >>> repair_bit_flip_by_digest(b"wnrd", hashlib.sha256(b"word").hexdigest())
        b'word'
    """
    if len(data) > FLIP_BYTES_MAX:
        return None
    trial = bytearray(data)
    for start in range(0, len(trial), _BLOCK_BYTES):
        before, rest = hashlib.sha256(trial[:start]), memoryview(trial)[start:]
        for index in range(min(_BLOCK_BYTES, len(rest))):
            for bit in range(8):
                rest[index] ^= 1 << bit
                whole = before.copy()
                whole.update(rest)
                if whole.hexdigest() == digest:
                    return bytes(trial)
                rest[index] ^= 1 << bit
    return None
