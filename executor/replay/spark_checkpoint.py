"""Rewinding of Spark's streaming checkpoints, for a repair, a rewind or a fork.

A checkpoint has a folder ``offsets`` with the range of each batch, a folder ``commits`` with the batches that are done,
one file per batch, and a file ``metadata`` with the query's id. Once the files after a batch are removed, the query
continues with the next batch and reads its offsets from the source again. Spark keeps the files of the last hundred
batches; the files of an older batch are restored from the store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

import orjson

from millpond.statestore.app_ids import AppId

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


def reached_batches(folder: Path) -> dict[str, Reached]:
    """Return the progress of all checkpoints in a folder, by query id."""
    reached = {}
    for query, checkpoint in checkpoints_in(folder).items():
        done, planned = (
            max((int(path.name) for path in _batches(checkpoint, part)), default=-1) for part in _PARTS
        )
        reached[query] = Reached(done=done, planned=planned)
    return reached


def checkpoints_in(folder: Path) -> dict[str, Path]:
    """Return the checkpoints in a folder, at any depth, by query id."""
    found = ((_id_of(metadata), metadata.parent) for metadata in sorted(folder.rglob("metadata")))
    return {query: checkpoint for query, checkpoint in found if query is not None}


def rewind_checkpoints(
    folder: Path,
    batches: Mapping[str, int],
    *,
    offsets: Mapping[str, str] = _NONE_KNOWN,
    dry_run: bool = False,
) -> tuple[str, ...]:
    """Rewind checkpoints in a folder, at any depth, and return the ids of the queries that a real or dry run changes.

    ``batches`` has the last batch to keep by query id, -1 for none; ``offsets`` has Spark's entry for that batch,
    which is restored if Spark has removed it.
    """
    rewound = []
    for query, checkpoint in checkpoints_in(folder).items():
        if query not in batches:
            continue
        last = batches[query]
        later = list(_later(checkpoint, last))
        if not dry_run and query in offsets and last >= 0:
            _write_missing(checkpoint, last, offsets[query])
        # Commits first: after a kill in between, Spark repeats a batch, which the store recognises.
        for path in () if dry_run else later:
            path.unlink(missing_ok=True)
            path.with_name(f".{path.name}.crc").unlink(missing_ok=True)
        if later:
            rewound.append(query)
    return tuple(rewound)


def by_query(entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Select the entries of inputs, and key them by the ids of the queries that deliver the inputs."""
    return {
        AppId.INPUT.parts(app_id)[-1]: entry
        for app_id, entry in entries.items()
        if app_id.startswith(AppId.INPUT)
    }


def _write_missing(checkpoint: Path, batch: int, entry: str) -> None:
    # Before anything is removed: a kill in between leaves a checkpoint that is ahead, which the next call rewinds.
    for part, text in (("offsets", entry), ("commits", _DONE)):
        target = checkpoint / part / str(batch)
        if not target.exists():
            target.write_text(text)
            target.with_name(f".{target.name}.crc").unlink(missing_ok=True)


def _later(checkpoint: Path, batch: int) -> Iterator[Path]:
    # Newest first: a kill in between leaves no gap.
    for part in _PARTS:
        later = [path for path in _batches(checkpoint, part) if int(path.name) > batch]
        yield from sorted(later, key=lambda path: int(path.name), reverse=True)


def _batches(checkpoint: Path, part: str) -> Iterator[Path]:
    return (path for path in (checkpoint / part).glob("*") if path.name.isdecimal())


def _id_of(metadata: Path) -> str | None:
    if not metadata.is_file():
        return None
    try:
        fields = orjson.loads(metadata.read_bytes())
    except ValueError:
        return None
    return fields.get("id") if isinstance(fields, dict) else None


# The file source's log: a note per file in ``sources/<number>``, and now and then one file with all notes so far
# (``19.compact``), after which Spark removes older ones. The source's offset is the number of its last note. Spark
# processes everything noted but not processed in one batch, however large. So a fork forgets the files noted after its
# version: then the source lists them again and cuts them into batches.

_VERSION: Final = b"v1"
_SOURCES: Final = "sources"
_OFFSETS: Final = "offsets"
_LINES_BEFORE_OFFSETS: Final = 2
_NO_NOTE: Final = -1


def forget_later_files(checkpoint: Path, batch: int) -> None:
    """Make a query's file sources forget files that no batch up to ``batch`` has covered.

    Sources that are not local folders stay unchanged. So does a source some of whose later files are gone: then Spark
    reports the missing files itself.
    """
    for source in sorted((checkpoint / _SOURCES).glob("*")):
        last = _NO_NOTE if batch < 0 else _last_note(checkpoint / _OFFSETS / str(batch), source.name)
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
    if last > _NO_NOTE:
        (source / f"{last}.compact").write_bytes(b"\n".join([_VERSION, *(line for _, line in kept)]))


def _notes(path: Path) -> Iterator[tuple[bytes, Mapping[str, Any] | None]]:
    """Yield the lines of a log file with their parsed notes; ``None`` for any other line."""
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
    """Return the offset of a file source at the end of a batch; ``None`` for other kinds of sources."""
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
