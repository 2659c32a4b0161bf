"""Which keys the files have that this process wrote or read last: a file that has none of those wanted is not read.

A file that a superstep wrote is read whole, and there are many of them. Their keys are mostly in the cache, so nearly
none is wanted from them. Large files have a filter of their keys of their own (`millpond.statestore.rows.page_index`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import numpy as np
import pyarrow as pa

from millpond.executor.soft_state.known_files import FileKeys
from millpond.statestore.rows.fingerprint import Fingerprints, fingerprints


class KeysOfFiles:
    """The fingerprints of the keys of some files, those noted last, within a bound of memory.

    Args:
        limit_bytes: how many bytes they may take together now; a key takes 8.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._keys: OrderedDict[str, Fingerprints] = OrderedDict()
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """How many bytes are kept."""
        return self._bytes

    def note(self, path: str, keys: pa.Array | pa.ChunkedArray) -> None:
        """Keep all keys of a file."""
        self.drop(path)
        self._keys[path] = np.sort(fingerprints(keys))
        self._bytes += self._keys[path].nbytes
        limit = self._limit_bytes()
        while self._bytes > limit and self._keys:
            self._bytes -= self._keys.popitem(last=False)[1].nbytes

    def drop(self, path: str) -> None:
        """Forget a file."""
        known = self._keys.pop(path, None)
        if known is not None:
            self._bytes -= known.nbytes

    def keep_only(self, paths: Collection[str]) -> None:
        """Forget all files but these."""
        for path in self._keys.keys() - paths:
            self.drop(path)

    def files_with(self, files: Sequence[FileKeys], keys: Sequence[str]) -> list[FileKeys]:
        """Those of the files that may have any of the keys: all whose keys are not known are among them."""
        low, high = min(keys), max(keys)
        in_range = [file for file in files if file.may_hold_any(low, high)]
        if not any(file.path in self._keys for file in in_range):
            return in_range
        wanted = fingerprints(pa.array(keys, pa.string()))
        return [file for file in in_range if self._may_have_any(file.path, wanted)]

    def _may_have_any(self, path: str, wanted: Fingerprints) -> bool:
        known = self._keys.get(path)
        if known is None:
            return True
        if not len(known):
            # After a split a file may have rows of the other part only.
            return False
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        return bool((known[places] == wanted).any())
