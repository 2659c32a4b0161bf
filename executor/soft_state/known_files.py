"""The committed files that soft state has read, and what to read when the list of files changes.

Soft state knows the files that it has read and the superstep that they reach. A file that
holds only later supersteps is new; one that can only repeat known rows is a rewrite
(OPTIMIZE, a compaction). If a change has any other cause, all rows are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.rows.files import LARGE_BYTES, RowFile


@dataclass(frozen=True, slots=True)
class FileKeys:
    """A file, the range of keys it may hold, ``None`` when unknown, and its length."""

    path: str
    min_key: str | None
    max_key: str | None
    size_bytes: int = 0

    def may_hold_any(self, low: str, high: str) -> bool:
        """Whether a key in ``low..high`` may be in the file."""
        return (self.max_key is None or low <= self.max_key) and (
            self.min_key is None or self.min_key <= high
        )


def large_among(files: Iterable[FileKeys]) -> frozenset[str]:
    """The paths of those of the files that may be worth reading in parts."""
    return frozenset(file.path for file in files if file.size_bytes >= LARGE_BYTES)


class KnownFiles:
    """The files that soft state has read or adopted.

    Attributes:
        position: the last one that is known to be committed.
        superstep: all that was committed up to this superstep has been read.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileKeys] = {}
        self.position: str | None = None
        self.superstep: int = 0

    @property
    def all(self) -> list[FileKeys]:
        """The files, including those that are only adopted."""
        return list(self._files.values())

    def adopt(self, file: RowFile) -> None:
        """Add a file that may never be committed."""
        self._files[file.path] = FileKeys(file.path, file.min_key, file.max_key, file.size_bytes)

    def disown(self, path: str) -> None:
        """Remove an adopted file that was never committed."""
        self._files.pop(path, None)

    def confirm(self, path: str, superstep: int) -> None:
        """Note that an adopted file has been committed."""
        self.position = path
        self.superstep = max(self.superstep, superstep)

    def are(self, files: Sequence[LiveFile]) -> bool:
        """Whether these are exactly the known files, so that there is nothing to do."""
        return len(files) == len(self._files) > 0 and all(file.path in self._files for file in files)

    def unread_in(self, files: Sequence[LiveFile]) -> list[LiveFile] | None:
        """The committed files that must be read to be up to date; ``None`` if all must be read from the start."""
        if not self._files:
            return None
        added = [file for file in files if file.path not in self._files]
        rewrites = [file for file in added if self._is_rewrite(file)]
        unread = [file for file in added if self._is_unread(file)]
        # If a file vanished without a rewrite, or one holds both old and new rows, all must be read again.
        has_lost_files = len(files) - len(added) < len(self._files) and not rewrites
        return None if has_lost_files or len(rewrites) + len(unread) < len(added) else unread

    def take_in(self, files: Sequence[LiveFile], unread: Sequence[LiveFile]) -> None:
        """Replace the known files by ``files``; ``unread`` are those whose rows the caller reads next."""
        self._files = {
            file.path: FileKeys(file.path, file.min_key, file.max_key, file.size_bytes) for file in files
        }
        if unread:
            newest = max(file.max_superstep or 0 for file in unread)
            self.confirm(unread[-1].path, newest)

    def _is_rewrite(self, file: LiveFile) -> bool:
        written_by_a_superstep = "interval" in file.tags and file.min_superstep is not None
        newest = file.max_superstep
        return not written_by_a_superstep and newest is not None and newest <= self.superstep

    def _is_unread(self, file: LiveFile) -> bool:
        return file.min_superstep is not None and file.min_superstep > self.superstep
