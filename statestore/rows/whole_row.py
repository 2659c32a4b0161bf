"""The rest of a row: its record ids and its undelivered productions, of all its updates together.

State, timers and hold of a key follow from its last updates (`millpond.statestore.rows.merge`); ids and
productions are spread over all of them. They are read separately, so that reading state does not pay for
them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.types import Superstep

_ORDER: Final = ("key", "sequencer", "commit_number")
ID_COLUMNS: Final = (*_ORDER, "record_ids")
"""The columns of an update that say which ids its key has."""

PRODUCTION_COLUMNS: Final = (*_ORDER, "superstep", "productions")
"""The columns of an update that say what its key has produced."""


def lists_by_key(updates: pa.Table, name: str) -> pa.Table:
    """The lists of a column, joined by key, oldest update first; only keys whose list is not empty.

    Args:
        updates: row updates in any order, with `ID_COLUMNS` or `PRODUCTION_COLUMNS`.
        name: ``record_ids`` or ``productions``.

    Returns:
        ``key`` and the column, sorted by key.
    """
    filled = updates.filter(pc.greater(pc.fill_null(pc.list_value_length(updates.column(name)), 0), 0))
    ordered = filled.sort_by([(column, "ascending") for column in _ORDER]).combine_chunks()
    lists = pa.array([], ROW_SCHEMA.field(name).type)
    if ordered.num_rows:
        lists = ordered.column(name).combine_chunks()
    keys = ordered.column("key").combine_chunks().dictionary_encode()
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    # Updates of a key lie together now, so its values do too: only the ends of the lists change.
    per_key = np.bincount(keys.indices.to_numpy(), weights=lengths, minlength=len(keys.dictionary))
    offsets = np.concatenate([[0], np.cumsum(per_key)]).astype(np.int32)
    joined = pa.ListArray.from_arrays(offsets, lists.flatten(), type=ROW_SCHEMA.field(name).type)
    return pa.table({"key": keys.dictionary, name: joined})


def pending_only(updates: pa.Table, pending_from: Superstep) -> pa.Table:
    """The updates whose productions no later superstep has delivered.

    Args:
        updates: row updates with `PRODUCTION_COLUMNS`.
        pending_from: the pipeline's last superstep; what earlier ones produced has been delivered.
    """
    return updates.filter(pc.greater_equal(updates.column("superstep"), pending_from))


class ListsOfKeys:
    """Looks up the lists of `lists_by_key` by key.

    Args:
        by_key: a result of `lists_by_key`.
        name: the column.
    """

    def __init__(self, by_key: pa.Table, name: str) -> None:
        lists = by_key.column(name).combine_chunks()
        self._rows: dict[str, int] = {key: row for row, key in enumerate(by_key.column("key").to_pylist())}
        self._none = len(lists)
        self._lists = pa.concat_arrays([lists, pa.array([[]], lists.type)])

    def at(self, keys: pa.Array | pa.ChunkedArray) -> pa.Array:
        """The lists of these keys, in their order; an empty one for a key that has none."""
        rows = [self._rows.get(key, self._none) for key in keys.to_pylist()]
        return self._lists.take(pa.array(rows, pa.int64()))
