"""Cold rows: rows that stay in Arrow, as read, until they are needed.

A new owner reads its rows once, for their timers (MillWheel §6.2). Most of them stay unused for a
while, and decoding a million rows into Python objects takes longer than reading them. So a row is
decoded when its key is first needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.soft_state.row_reader import LoadedRows, load_rows
from millpond.statestore.rows.row import STATE_VERSION
from millpond.statestore.rows.wide_column import take_rows

_COLUMNS: Final = ("key", "state", "state_bytes", STATE_VERSION, "timers")
_COMPACT: Final = 2
"""When at most one in so many rows is left, the memory of the others is released."""


class ColdRows:
    """Rows that are taken out one by one.

    Args:
        merged: one row per key.
        weights: what each row would cost in the cache.
        state_version: that of the computation's code.
    """

    def __init__(self, merged: pa.Table, weights: npt.NDArray[np.int64], state_version: int = 0) -> None:
        self._state_version = state_version
        self._table = merged.select(_COLUMNS)
        self._weights = weights
        self._indices = dict(zip(merged.column("key").to_pylist(), range(merged.num_rows), strict=True))

    def __len__(self) -> int:
        return len(self._indices)

    def among(self, keys: Iterable[str]) -> list[str]:
        """The subset of the keys whose rows are here."""
        indices = self._indices
        return [key for key in keys if key in indices]

    @property
    def keys(self) -> list[str]:
        """The keys of all rows that are here."""
        return list(self._indices)

    @property
    def weights(self) -> npt.NDArray[np.int64]:
        """What the row of each of `keys` would cost in the cache."""
        weights: npt.NDArray[np.int64] = self._weights[list(self._indices.values())]
        return weights

    def take(self, keys: Sequence[str]) -> tuple[LoadedRows, int]:
        """Remove and return the rows of keys that are all here, with their total weight."""
        indices = list(map(self._indices.pop, keys))
        rows = pa.array(indices, pa.int64())
        columns = {name: take_rows(self._table.column(name), rows) for name in _COLUMNS}
        taken = load_rows(pa.table(columns), self._state_version)
        weight = int(self._weights[indices].sum())
        self._compact()
        return taken, weight

    def drop(self, keys: Iterable[str]) -> int:
        """Remove the rows of keys that are all here, and return their total weight."""
        indices = list(map(self._indices.pop, keys))
        weight = int(self._weights[indices].sum())
        self._compact()
        return weight

    def _compact(self) -> None:
        if len(self._indices) * _COMPACT > self._table.num_rows:
            return
        kept = np.zeros(self._table.num_rows, np.bool_)
        kept[list(self._indices.values())] = True
        # A filter works chunk by chunk: all states together may be more than one array holds.
        self._table, self._weights = self._table.filter(pa.array(kept)), self._weights[kept]
        self._indices = dict(
            zip(self._table.column("key").to_pylist(), range(self._table.num_rows), strict=True)
        )
