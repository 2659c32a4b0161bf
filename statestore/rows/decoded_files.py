"""Small row files that were decoded last: several readers of a process read the same ones.

A takeover scans an interval's files and then reads its rows, a key that was evicted is read back, and a run that
resumes reads what the run before it has read. To open a small Parquet file costs far more than to compare its bytes,
so a table is known by the bytes that it was decoded from: a file that has changed is another file.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, TypeAlias

import pyarrow as pa

FileKey: TypeAlias = tuple[bytes, str, tuple[str, ...]]
"""A file's bytes, the name that it is sealed under, and the columns that are decoded."""

_SHARE_MAX: Final = 16
"""No table takes more than this part of the room."""


class DecodedFiles:
    """Decoded tables within a bound of memory, those used last; threads may share it.

    Args:
        bytes_max: how many bytes files and tables take together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._tables: OrderedDict[FileKey, tuple[pa.Table, int]] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes are kept."""
        return self._bytes

    def get(self, key: FileKey) -> pa.Table | None:
        """The table of such a file; ``None`` if it is not kept."""
        with self._lock:
            known = self._tables.get(key)
            if known is None:
                return None
            self._tables.move_to_end(key)
            return known[0]

    def put(self, key: FileKey, table: pa.Table) -> None:
        """Keep a table, unless it is large, in the place of those whose last use is longest ago."""
        size = len(key[0]) + table.get_total_buffer_size()
        if size * _SHARE_MAX > self._bytes_max:
            return
        with self._lock:
            if key not in self._tables:
                self._tables[key] = table, size
                self._bytes += size
            while self._bytes > self._bytes_max:
                _, (_, freed) = self._tables.popitem(last=False)
                self._bytes -= freed
