"""
Which committed files soft state rests on, and what another list of them means.

Soft state knows the files it has taken in and the superstep that they reach. A file that
holds only later supersteps is new; one that can only repeat what is known is a rewrite
(OPTIMIZE, a compaction). Anything else proves nothing, and then all rows are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.rows.files import RowFile

__all__ = ["FileKeys", "KnownFiles"]


@dataclass(frozen=True, slots=True)
class FileKeys:
    """
    A file and the range of keys it may hold; ``None`` when unknown.
    """

    path: str
    min_key: str | None
    max_key: str | None

    def may_hold_any(self, low: str, high: str) -> bool:
        """
        Whether a key in ``low..high`` may be in the file.
        """
        return (self.max_key is None or low <= self.max_key) and (
            self.min_key is None or self.min_key <= high
        )


class KnownFiles:
    """
    The files that soft state has taken in.

    Attributes:
        position: the last one that is known to be committed.
        superstep: everything that was committed up to this superstep has been taken in.
    """

    def __init__(self) -> None:
        self._files: dict[str, FileKeys] = {}
        self.position: str | None = None
        self.superstep: int = 0

    @property
    def all(self) -> list[FileKeys]:
        """
        The files, those included that are only adopted.
        """
        return list(self._files.values())

    def adopt(self, file: RowFile) -> None:
        """
        Add a file that may never be committed.
        """
        self._files[file.path] = FileKeys(file.path, file.min_key, file.max_key)

    def disown(self, path: str) -> None:
        """
        Take out a file that was adopted in vain.
        """
        self._files.pop(path, None)

    def confirm(self, path: str, superstep: int) -> None:
        """
        A file that was adopted has been committed.
        """
        self.position = path
        self.superstep = max(self.superstep, superstep)

    def are(self, files: Sequence[LiveFile]) -> bool:
        """
        Whether these are the very files, so that there is nothing to do.
        """
        return len(files) == len(self._files) > 0 and all(file.path in self._files for file in files)

    def unread_in(self, files: Sequence[LiveFile]) -> list[LiveFile] | None:
        """
        The committed files that must be read to be up to date; ``None``: all of them, from nothing.
        """
        if not self._files:
            return None
        added = [file for file in files if file.path not in self._files]
        rewrites = [file for file in added if self._is_rewrite(file)]
        unread = [file for file in added if self._is_unread(file)]
        # Files that went without a trace, or that hold old and new rows alike, prove nothing.
        has_lost_files = len(files) - len(added) < len(self._files) and not rewrites
        return None if has_lost_files or len(rewrites) + len(unread) < len(added) else unread

    def take_in(self, files: Sequence[LiveFile], unread: Sequence[LiveFile]) -> None:
        """
        Rest on ``files`` from now on; ``unread`` are those whose rows are not taken in yet.
        """
        self._files = {file.path: FileKeys(file.path, file.min_key, file.max_key) for file in files}
        if unread:
            newest = max(file.max_superstep or 0 for file in unread)
            self.confirm(unread[-1].path, newest)

    def _is_rewrite(self, file: LiveFile) -> bool:
        written_by_a_superstep = "interval" in file.tags and file.min_superstep is not None
        newest = file.max_superstep
        return not written_by_a_superstep and newest is not None and newest <= self.superstep

    def _is_unread(self, file: LiveFile) -> bool:
        return file.min_superstep is not None and file.min_superstep > self.superstep
