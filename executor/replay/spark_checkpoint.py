"""Rewinding of Spark's streaming checkpoints, for a repair, a rewind or a fork.

A checkpoint has a folder ``offsets`` with the range of each batch, a folder ``commits`` with the batches that are done,
one file per batch, and a file ``metadata`` with the query's id. Once the files after a batch are removed, the query
continues with the next batch and reads its offsets from the source again. Spark keeps the files of the last hundred
batches; the files of an older batch are restored from the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import orjson

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ObjectExistsError, ObjectMissingError
from millpond.statestore.objects.hadoop import scheme_of
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.types import Objects

_Entry = TypeVar("_Entry")

_PARTS: Final = ("commits", "offsets")
_DONE: Final = 'v1\n{"nextBatchWatermarkMs":0}'
"""Spark's entry for a finished batch."""

_NONE_KNOWN: Final[Mapping[str, str]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A query's progress by its checkpoint: the last finished and the last started batch; -1 before the first."""

    done: int
    planned: int

    def is_ahead_of(self, consumed: int) -> bool:
        """Return True if Spark would skip a batch after ``consumed``, the last batch in the store (-1 for none)."""
        return self.done > consumed or self.planned > consumed + 1


def reached_batches(
    folder: str | Path, storage_options: Mapping[str, str] | None = None
) -> dict[str, Reached]:
    reached = {}
    for query, checkpoint in checkpoints_in(folder, storage_options).items():
        files = _files_in(checkpoint, storage_options)
        done, planned = (max(map(int, _batches(files, part)), default=-1) for part in _PARTS)
        reached[query] = Reached(done=done, planned=planned)
    return reached


def checkpoints_in(folder: str | Path, storage_options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the checkpoints in a folder, at any depth, by query id; a link in it raises `DataError`."""
    files = _files_in(folder, storage_options)
    if isinstance(files, LocalObjects):
        if not Path(folder).is_dir():
            return {}
        # Spark would follow a link, and so would the writes below.
        files.refuse_links()
    paths = [PurePath(path) for path in files.list("")]
    found = (
        (_object(files.get(str(path))).get("id"), f"{folder}/{path.parent}")
        for path in paths
        if path.name == "metadata"
    )
    return {query: checkpoint for query, checkpoint in found if isinstance(query, str)}


def _files_in(folder: str | Path, storage_options: Mapping[str, str] | None = None) -> Objects:
    return (
        open_objects(str(folder), storage_options) if scheme_of(folder) else LocalObjects(folder, "os_cache")
    )


def rewind_checkpoints(
    folder: str | Path,
    batches: Mapping[str, int],
    *,
    offsets: Mapping[str, str] = _NONE_KNOWN,
    storage_options: Mapping[str, str] | None = None,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Rewind checkpoints in a folder, at any depth, and return the ids of the queries that a real or dry run changes.

    ``batches`` has the last batch to keep by query id, -1 for none; ``offsets`` has Spark's entry for that batch,
    which is restored if Spark has removed it.
    """
    rewound = []
    for query, checkpoint in checkpoints_in(folder, storage_options).items():
        if query not in batches:
            continue
        last, files = batches[query], _files_in(checkpoint, storage_options)
        later = [
            path
            for part in _PARTS
            # Newest first: a kill in between leaves no gap.
            for name in reversed(_batches(files, part))
            if int(name) > last
            for path in (f"{part}/{name}", f"{part}/.{name}.crc")
        ]
        if later:
            rewound.append(query)
        if dry_run:
            continue
        if query in offsets and last >= 0:
            # Before anything is removed: a kill in between leaves a checkpoint that is ahead, which the next call
            # rewinds.
            for part, text in (("offsets", offsets[query]), ("commits", _DONE)):
                with suppress(ObjectExistsError):
                    files.put_if_absent(f"{part}/{last}", text.encode())
                    files.delete([f"{part}/.{last}.crc"])
        # Commits first: after a kill in between, Spark repeats a batch, which the store recognises.
        files.delete(later)
    return tuple(rewound)


def by_query(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Select the entries of inputs, and key them by the ids of the queries that deliver the inputs."""
    return {
        AppId.INPUT.parts(app_id)[-1]: entry
        for app_id, entry in entries.items()
        if app_id.startswith(AppId.INPUT)
    }


def _batches(files: Objects, part: str) -> list[str]:
    names = (path.removeprefix(f"{part}/") for path in files.list(part))
    return sorted((name for name in names if name.isdecimal()), key=int)


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; anything else is an empty one."""
    try:
        found = orjson.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# The file source's log: a note per file in ``sources/<number>``, and now and then one file with all notes so far
# (``19.compact``), after which Spark removes older ones. The source's offset is the number of its last note. Spark
# processes everything noted but not processed in one batch, however large. So a fork forgets the files noted after its
# version: then the source lists them again and cuts them into batches.

_VERSION: Final = b"v1"
_SOURCES: Final = "sources"
_OFFSETS: Final = "offsets"
_LINES_BEFORE_OFFSETS: Final = 2
_NO_NOTE: Final = -1


def forget_later_files(checkpoint: str | Path, batch: int) -> None:
    """Make a query's file sources forget files that no batch up to ``batch`` has covered.

    Sources that are not local folders stay unchanged. So does a source some of whose later files are gone: then Spark
    reports the missing files itself.
    """
    files = _files_in(checkpoint)
    for source in sorted({path.split("/")[1] for path in files.list(_SOURCES)}):
        last = _NO_NOTE if batch < 0 else _last_note(files, batch, source)
        if last is not None:
            _forget(files, f"{_SOURCES}/{source}", last)


def _forget(files: Objects, source: str, last: int) -> None:
    paths = files.list(source)
    logs = [path for path in paths if path.rpartition("/")[2].removesuffix(".compact").isdecimal()]
    notes = {line: note for path in logs for line, note in _notes(files.get(path))}
    if None in notes.values():
        return
    known = {line: note for line, note in notes.items() if note is not None}
    later = [note for note in known.values() if note["batchId"] > last]
    if not later or not all(_is_there(note["path"]) for note in later):
        return
    kept = sorted((note["batchId"], line) for line, note in known.items() if note["batchId"] <= last)
    files.delete(paths)
    if last > _NO_NOTE:
        files.put(f"{source}/{last}.compact", b"\n".join([_VERSION, *(line for _, line in kept)]))


def _notes(data: bytes) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    """Yield the lines of a log file with their parsed notes; ``None`` for any other line."""
    version, *lines = data.split(b"\n")
    if version != _VERSION:
        yield version, None
    for line in lines:
        note = _object(line)
        is_note = isinstance(note.get("path"), str) and isinstance(note.get("batchId"), int)
        yield line, note if is_note else None


def _last_note(files: Objects, batch: int, source: str) -> int | None:
    """Return the offset of a file source at the end of a batch; ``None`` for other kinds of sources."""
    try:
        line = files.get(f"{_OFFSETS}/{batch}").split(b"\n")[_LINES_BEFORE_OFFSETS + int(source)]
    except (ObjectMissingError, ValueError, IndexError):
        return None
    last = _object(line).get("logOffset")
    return last if isinstance(last, int) else None


def _is_there(path: str) -> bool:
    try:
        url = urlsplit(path)
        return url.scheme == "file" and Path(unquote(url.path)).exists()
    except (OSError, ValueError):
        return False
