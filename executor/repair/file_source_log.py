"""Takes the log of Spark's file source back to an earlier offset, for a fork.

The source notes each file that it has seen, in ``sources/<number>`` of a query's checkpoint; its offset is the number
of the last note. What it has seen and not processed it processes in one batch, however large. So a fork has to forget
the files that came after its version: then the source lists them again, and cuts them into batches as it is told.

The log is a file per note, and now and then one with all notes up to then (``19.compact``), after which Spark removes
older ones. So what stays is written as one such file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import orjson

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
