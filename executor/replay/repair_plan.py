"""Plans a repair: finds the newest state of a damaged store that can be restored.

A damaged file that a compaction wrote is replaced by the files that it was compacted from, if these
still exist; nothing is lost. Otherwise the whole table goes back to the newest version all of whose
files are intact: state, timers, ids and productions of all keys together with the positions of all
inputs, so that what was consumed since is read again. Planning changes nothing.

Takes the log of Spark's file source back to an earlier offset, for a fork.

The source notes each file that it has seen, in ``sources/<number>`` of a query's checkpoint; its offset is the number
of the last note. What it has seen and not processed it processes in one batch, however large. So a fork has to forget
the files that came after its version: then the source lists them again, and cuts them into batches as it is told.

The log is a file per note, and now and then one with all notes up to then (``19.compact``), after which Spark removes
older ones. So what stays is written as one such file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import orjson

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import DataError, ObjectMissingError
from millpond.statestore.history.replayed_log import TableHistory, TableState, read_histories
from millpond.statestore.history.verification import repair_bit_flip
from millpond.statestore.log.action import Add, Txn
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import LOG_FOLDER, Log, LogInventory, commit_path
from millpond.statestore.log.writer import log_boundary
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.row_format import parquet_seal_holds
from millpond.statestore.types import Objects, TableVersion

_COMPACTION_KINDS: Final = frozenset({"compaction", "fold"})
"""The kinds of a compaction's commit: the current one, and that of stores of 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A damaged file, and the intact files that have the same contents."""

    path: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """How to repair a store.

    Attributes:
        newest: the newest version that ever existed, by the log and the mark.
        state: the table after the repair: live files, and transactions before the repair advances them.
        history: the log's history, up to where it can be read.
        healed: files in which one bit was flipped, as they were written, by path.
        restored: damaged files whose contents exist in other files.
        lost: damaged or missing live files whose contents do not.
        set_aside: files to remove from the log; copies are kept.
        txns: the newest transactions of any readable commit.
        is_readable: whether the log can be read to its end, so that older versions stay readable.
        kind: what its commit is called: "repair" or "rewind".
        source_offsets: where the inputs are in their sources after it; see `CommitRequest`.
        watermarks: the low watermarks of its intervals, as far as they are known.
    """

    newest: TableVersion
    state: TableState
    history: TableHistory
    healed: dict[str, bytes]
    restored: tuple[Restored, ...]
    lost: tuple[str, ...]
    set_aside: tuple[str, ...]
    txns: dict[str, int]
    is_readable: bool
    kind: str = "repair"
    source_offsets: Mapping[str, str] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to repair."""
        return bool(self.healed or self.set_aside or self.restored or self.is_rollback)

    @property
    def is_rollback(self) -> bool:
        """Whether commits are undone."""
        return self.state.version < self.newest

    def supersteps(self) -> dict[str, tuple[int, int]]:
        """By application id of a pipeline's superstep: the last one after the repair, and before it."""
        return self._moved(AppId.SUPERSTEP)

    def inputs(self) -> dict[str, tuple[int, int]]:
        """By application id of an input: the consumed position after the repair, and before it; -1 for none."""
        return self._moved(AppId.INPUT)

    def consumed(self) -> dict[str, int]:
        """By source of an input: the consumed position after the repair; -1 for none."""
        newest: dict[str, int] = {}
        for app_id in self.txns:
            if app_id.startswith(AppId.INPUT):
                source = unquote(app_id.rpartition("/")[2])
                newest[source] = max(self.state.txns.get(app_id, -1), newest.get(source, -1))
        return newest

    @property
    def is_after_repair(self) -> bool:
        """Whether the newest commit is an earlier repair's, which may have been interrupted after it."""
        return bool(self.history.changes) and self.history.changes[-1].kind == "repair"

    def _moved(self, prefix: str) -> dict[str, tuple[int, int]]:
        return {
            app_id: (self.state.txns.get(app_id, -1), was)
            for app_id, was in sorted(self.txns.items())
            if app_id.startswith(prefix) and self.state.txns.get(app_id, -1) != was
        }


class _Files:
    """Which row files are intact, or would be with one bit flipped back; each is read once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._whole: dict[str, bool] = {}
        self.healed: dict[str, bytes] = {}

    def is_whole(self, path: str) -> bool:
        if path not in self._whole:
            try:
                read_row_files(self._objects, [path])
            except DataError:
                self._whole[path] = self._heal(path)
            else:
                self._whole[path] = True
        return self._whole[path]

    def _heal(self, path: str) -> bool:
        try:
            damaged = self._objects.get(path)
        except ObjectMissingError:
            return False
        name = path.rpartition("/")[2]
        whole = repair_bit_flip(damaged, lambda data: parquet_seal_holds(memoryview(data), name))
        if whole is None:
            return False
        memory = MemoryObjects()
        memory.put(path, whole)
        try:
            read_row_files(memory, [path])
        except DataError:
            return False
        self.healed[path] = whole
        return True

    def sources_of(self, path: str, history: TableHistory) -> tuple[Add, ...] | None:
        """The intact files that a damaged one was compacted from; ``None`` if some of them are gone."""
        change = history.maker_of(path)
        if change is None or change.kind not in _COMPACTION_KINDS:
            return None
        interval = next(add.tags.get("interval") for add in change.added if add.path == path)
        sources: list[Add] = []
        for source in change.removed:
            if source.tags.get("interval") != interval:
                continue
            intact = (source,) if self.is_whole(source.path) else self.sources_of(source.path, history)
            if intact is None:
                return None
            sources += intact
        return tuple(sources) or None


def plan_repair(objects: Objects, mark: Mark | None) -> RepairPlan:
    """Find the newest state that can be restored.

    Args:
        objects: the table's root.
        mark: the high-water mark; ``None`` if it is not known.

    Raises:
        DataError: there is none; restore the store from a copy.
        UnavailableError: the store is unavailable.
    """
    log, files = Log(objects), _Files(objects)
    inventory = log.inventory()
    latest = max(-1 if inventory.latest is None else inventory.latest, -1 if mark is None else mark.version)
    newest, lost = TableVersion(latest), set[str]()
    for history in read_histories(log, mark):
        bad = set[str]()
        for state, came_back in history.states():
            bad = {path for path in bad if path in state.live}
            bad |= {path for path in came_back if not files.is_whole(path)}
            sources = {path: files.sources_of(path, history) for path in bad}
            gone = [path for path, adds in sources.items() if adds is None]
            if gone:
                lost.update(gone)
                continue
            restored = []
            for path, adds in sorted(sources.items()):
                del state.live[path]
                state.live |= {add.path: add for add in adds or ()}
                restored.append(Restored(path=path, sources=tuple(add.path for add in adds or ())))
            is_readable = history.newest == newest
            return RepairPlan(
                newest=newest,
                state=state,
                history=history,
                healed={path: data for path, data in files.healed.items() if path in state.live}
                | {commit_path(version): data for version, data in history.healed.items()},
                restored=tuple(restored),
                lost=tuple(sorted(lost)),
                set_aside=_set_aside(log, inventory, history, is_readable=is_readable),
                txns=_newest_txns(log, inventory, history),
                is_readable=is_readable,
            )
    raise DataError(
        "no version of the store is intact: restore it from a copy", store=objects.url, lost=len(lost)
    )


def _set_aside(
    log: Log, inventory: LogInventory, history: TableHistory, *, is_readable: bool
) -> tuple[str, ...]:
    broken = set[str]()
    for checkpoint in inventory.checkpoints:
        try:
            tuple(log.read_checkpoint(checkpoint))
        except DataError:
            broken.update(checkpoint.paths)
    if not is_readable:
        return tuple(path for path in log.objects.list(LOG_FOLDER) if _is_of_log(path))
    boundary = log_boundary(log.objects)
    before = [version for version in inventory.versions if boundary <= version < history.start]
    if not history.is_start_chained and history.start in inventory.versions:
        before.append(history.start)
    whole = range(before[0], history.start) if before else range(0)
    if before and (list(whole) != before or any(not _is_whole(log, version) for version in before)):
        # A reader begins with the first commit, so all commits before the checkpoint are removed together.
        broken.update(commit_path(version) for version in before)
        broken.update(
            path
            for checkpoint in inventory.checkpoints
            if checkpoint.version < history.start
            for path in checkpoint.paths
        )
    return tuple(sorted(broken))


def _is_of_log(path: str) -> bool:
    return path.removeprefix(f"{LOG_FOLDER}/")[:20].isdecimal()


def _is_whole(log: Log, version: TableVersion) -> bool:
    try:
        decode(log.read(version) or b"", commit_path(version))
    except DataError:
        return False
    return True


def _newest_txns(log: Log, inventory: LogInventory, history: TableHistory) -> dict[str, int]:
    """The last known transactions: from the history, and from single readable commits after it."""
    txns = dict(history.state.txns)
    for version in inventory.versions:
        if version > history.newest:
            try:
                actions = decode(log.read(version) or b"", commit_path(version))
            except DataError:
                continue
            for action in actions:
                if isinstance(action, Txn):
                    txns[action.app_id] = max(action.version, txns.get(action.app_id, action.version))
    return txns


_VERSION: Final = b"v1"
_SOURCES: Final = "sources"
_OFFSETS: Final = "offsets"
_LINES_BEFORE_OFFSETS: Final = 2
_NONE: Final = -1


def forget_later_files(checkpoint: Path, batch: int) -> None:
    """Have the file sources of a query forget the files that none of its batches up to this one has covered.

    Sources that are no folders of this machine stay as they are; so does one of whose later files some are gone, so
    that Spark tells of it.

    Args:
        checkpoint: the query's checkpoint; no query runs on it.
        batch: the last batch that it has; -1 for none.
    """
    for source in sorted((checkpoint / _SOURCES).glob("*")):
        last = _NONE if batch < 0 else _last_note(checkpoint / _OFFSETS / str(batch), source.name)
        if last is not None:
            _forget(source, last)


def _forget(source: Path, last: int) -> None:
    logs = [path for path in source.iterdir() if path.name.removesuffix(".compact").isdecimal()]
    notes = {line: note for path in logs for line, note in _notes(path)}
    if None in notes.values():
        return
    known = {line: note for line, note in notes.items() if note is not None}
    later = [note for note in known.values() if note["batchId"] > last]
    if not later or not all(_is_there(str(note["path"])) for note in later):
        return
    kept = sorted((note["batchId"], line) for line, note in known.items() if note["batchId"] <= last)
    for path in source.iterdir():
        path.unlink()
    if last > _NONE:
        (source / f"{last}.compact").write_bytes(b"\n".join([_VERSION, *(line for _, line in kept)]))


def _notes(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    """The lines of a file of the log, with what they say; ``None`` if that is something else."""
    version, *lines = path.read_bytes().split(b"\n")
    if version != _VERSION:
        yield version, None
    for line in lines:
        yield line, _note(line)


def _note(line: bytes) -> Mapping[str, Any] | None:
    try:
        note = orjson.loads(line)
    except ValueError:
        return None
    return note if isinstance(note, dict) and {"path", "batchId"} <= note.keys() else None


def _last_note(offsets: Path, source: str) -> int | None:
    """The offset of a file source at the end of a batch; ``None`` for one of another kind."""
    try:
        line = offsets.read_bytes().split(b"\n")[_LINES_BEFORE_OFFSETS + int(source)]
        offset = orjson.loads(line)
    except (OSError, ValueError, IndexError):
        return None
    last = offset.get("logOffset") if isinstance(offset, dict) else None
    return last if isinstance(last, int) else None


def _is_there(path: str) -> bool:
    url = urlsplit(path)
    return url.scheme == "file" and Path(unquote(url.path)).exists()
