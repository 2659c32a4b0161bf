"""Page indexes that were read last: several reads of a process want parts of the same files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from millpond.statestore.rows.page_index import PageIndex, read_page_index
from millpond.statestore.types import Objects

_NONE_BYTES: Final = 256
"""What it costs to know that a file has no index."""


class PageIndexes:
    """Page indexes within a bound of memory, those used last; threads may share it.

    Args:
        bytes_max: how many bytes they take together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], tuple[PageIndex | None, int]] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes are kept, by estimate."""
        return self._bytes

    def of(self, objects: Objects, path: str, name: str) -> PageIndex | None:
        """The page index of a row file, kept or read; ``None`` if it has none.

        Args:
            objects: the table's root.
            path: the file.
            name: the name that it was sealed under, which no other file ever has.

        Raises:
            ObjectMissingError: there is no such file.
            UnavailableError: the store is unavailable.
        """
        file = objects.url, path
        with self._lock:
            if file in self._known:
                self._known.move_to_end(file)
                return self._known[file][0]
        index = read_page_index(objects, path, name)
        size = _NONE_BYTES if index is None else index.size_bytes
        with self._lock:
            if file not in self._known:
                self._known[file] = index, size
                self._bytes += size
            while self._bytes > self._bytes_max:
                _, (_, freed) = self._known.popitem(last=False)
                self._bytes -= freed
        return index


PAGE_INDEXES: Final = PageIndexes(64 << 20)
"""Those of this process."""
