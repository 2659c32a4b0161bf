"""Change streams: inserted, replaced and deleted rows, as elements and retractions.

Such rows are first made *flat*: one row per image, which is the source table's row before or after the
change, with

- ``__change_sign``: 1 if the image is new, -1 if it is retracted,
- ``__change_error``: the reason why the change cannot be used, or null,
- every other field of the change, its name prefixed with ``__change_``.

Three forms are known: Debezium's envelope (``before``, ``after`` and an ``op`` of ``c r u d``), Delta's
change data feed (``insert``, ``update_preimage``, ``update_postimage``, ``delete``), and ``+I -U +U -D``.
Key, time and id come from the image, so a retraction falls into the windows of the original row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.inputs.payload import python_rows
from millpond.executor.inputs.reserved import refuse_reserved
from millpond.statestore.errors import InvalidError
from millpond.statestore.loading.parquet_files import without_views

META_PREFIX: Final = "__change_"
_FIRST_ROWS: Final = 1_000
CHANGE_SIGN: Final = "__change_sign"
CHANGE_ERROR: Final = "__change_error"
DELTA_TYPE: Final = "_change_type"
DELTA_VERSION: Final = "__change__commit_version"
_DELTA_META: Final = (DELTA_TYPE, "_commit_version", "_commit_timestamp")

SIGN_OF_WORD: Final[Mapping[str, int]] = {
    **dict.fromkeys(("insert", "update_postimage", "+I", "+U", "c", "r"), 1),
    **dict.fromkeys(("delete", "update_preimage", "-D", "-U", "d"), -1),
}
"""Sign of a row that is an image itself: 1 for an element, -1 for a retraction."""

ENVELOPE_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "c": ("after",),
    "r": ("after",),
    "u": ("before", "after"),
    "d": ("before",),
}
"""Images that a change in an envelope needs, in the order in which they apply."""

UNKNOWN_CHANGE: Final = "no such change, or it does not have the row that it takes back or brings"
"""The error of an unusable change, for its dead letter."""


_NO_WORD: Final = "the row has no field that says what kind of change it is"


def meta_field(name: str) -> str:
    """Return the field of a flat row for the change's own field ``name``: ``ts_ms`` becomes ``__change_ts_ms``."""
    return META_PREFIX + name


def image_names(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not name.startswith(META_PREFIX))


def renamed(change: str, name: str) -> str:
    """Return the name in a flat row of a change's field, which is the image's or the change's own."""
    is_meta = name == change or (change == DELTA_TYPE and name in _DELTA_META)
    return meta_field(name) if is_meta else name


def flat_rows(change: str, rows: Any) -> Any:
    """Return changes as flat rows; ``change`` is the field with the kind of change."""
    if not isinstance(rows, pa.Table):
        _refuse_reserved_fields(rows)
        flat = [image for row in rows for image in _flat(change, row)]
        if any(isinstance(row, Mapping) and DELTA_VERSION in row for row in flat):
            flat.sort(key=_commit_order)
        return flat
    refuse_reserved(rows.column_names, META_PREFIX)
    if change not in rows.column_names:
        raise InvalidError("the input has no such change column", column=change, columns=rows.column_names)
    if {"before", "after"} <= set(rows.column_names):
        listed = python_rows(rows)
        _refuse_reserved_fields(listed)
        return [image for row in listed for image in _flat(change, row)]
    return in_commit_order(_flat_table(change, rows))


def _refuse_reserved_fields(rows: Sequence[Any]) -> None:
    """Refuse fields of changes and of their images that a flat row has itself, as they would be lost."""
    mappings = [row for row in rows[:_FIRST_ROWS] if isinstance(row, Mapping)]
    images = [row.get(name) for row in mappings for name in ("before", "after")]
    refuse_reserved(
        set().union(*mappings, *(image for image in images if isinstance(image, Mapping))), META_PREFIX
    )


def _commit_order(row: Any) -> tuple[int, int]:
    # Rows that are not mappings come first in their order: they become dead letters.
    return (row.get(DELTA_VERSION) or 0, row[CHANGE_SIGN]) if isinstance(row, Mapping) else (0, 0)


def in_commit_order(table: pa.Table) -> pa.Table:
    """Sort flat rows of a Delta feed by commit; within a commit retractions come first."""
    if DELTA_VERSION not in table.column_names:
        return table
    order = pc.sort_indices(table, [(DELTA_VERSION, "ascending"), (CHANGE_SIGN, "ascending")])
    return table.take(order)


def _flat(change: str, row: Any) -> list[Any]:
    if not isinstance(row, Mapping):
        return [row]
    if change not in row:
        return [{**row, CHANGE_SIGN: 0, CHANGE_ERROR: _NO_WORD}]
    word = row[change]
    if all(
        name in row and (row[name] is None or isinstance(row[name], Mapping)) for name in ("before", "after")
    ):
        return _images_of(change, word, row)
    sign = SIGN_OF_WORD.get(word, 0) if isinstance(word, str) else 0
    fields = {renamed(change, name): value for name, value in row.items()}
    return [{**fields, CHANGE_SIGN: sign, CHANGE_ERROR: None if sign else UNKNOWN_CHANGE}]


def _images_of(change: str, word: Any, row: Mapping[str, Any]) -> list[Any]:
    meta = {meta_field(name): value for name, value in row.items() if name not in ("before", "after")}
    if row[change] is None and row["before"] is None and row["after"] is None:
        # A tombstone only marks the change before it as the last one of its key.
        return []
    wanted = ENVELOPE_WORDS.get(word, ()) if isinstance(word, str) else ()
    if not wanted or any(row[name] is None for name in wanted):
        image = row["after"] or row["before"] or {}
        return [{**meta, **image, CHANGE_SIGN: 0, CHANGE_ERROR: UNKNOWN_CHANGE}]
    return [
        {**meta, **row[name], CHANGE_SIGN: -1 if name == "before" else 1, CHANGE_ERROR: None}
        for name in wanted
    ]


def _flat_table(change: str, rows: pa.Table) -> pa.Table:
    words = rows.column(change).combine_chunks().cast(pa.string())
    known = pc.index_in(words, pa.array(list(SIGN_OF_WORD)))
    signs = pa.array([*SIGN_OF_WORD.values()], pa.int8()).take(known)
    errors = pa.array([UNKNOWN_CHANGE]).take(pc.if_else(pc.is_null(known), 0, None))
    flat = rows.rename_columns([renamed(change, name) for name in rows.column_names])
    # Delta's reader gives views, which Arrow cannot sort.
    return (
        without_views(flat)
        .append_column(CHANGE_SIGN, pc.fill_null(signs, 0))
        .append_column(CHANGE_ERROR, errors)
    )


def change_errors(rows: Any) -> dict[int, str]:
    cells = _cells(rows, CHANGE_ERROR)
    return {index: str(error) for index, error in enumerate(cells) if error is not None}


def change_signs(rows: Any) -> npt.NDArray[np.int8]:
    """Return 1 for each new flat row, -1 for each retracted one, 0 for each unusable one."""
    if isinstance(rows, pa.Table) and CHANGE_SIGN in rows.column_names:
        signs: npt.NDArray[np.int8] = pc.fill_null(rows.column(CHANGE_SIGN), 0).to_numpy().astype(np.int8)
        return signs
    return np.array([sign or 0 for sign in _cells(rows, CHANGE_SIGN)], np.int8)


def _cells(rows: Any, name: str) -> list[Any]:
    if isinstance(rows, pa.Table):
        return rows.column(name).to_pylist() if name in rows.column_names else [None] * rows.num_rows
    return [row.get(name) if isinstance(row, Mapping) else None for row in rows]


def signed_ids(ids: pa.BinaryArray, signs: npt.NDArray[np.int8]) -> pa.BinaryArray:
    """Mark the ids of retracted rows, so that the old and the new image of one change have different ids."""
    # Otherwise deduplication would drop the second image of an update as a repetition of the first.
    marks = pa.array([b"-" if sign < 0 else b"" for sign in signs.tolist()], pa.binary())
    return pc.binary_join_element_wise(ids, marks, pa.scalar(b"", pa.binary()))


def images(rows: Any) -> Any:
    if isinstance(rows, pa.Table):
        return rows.select(list(image_names(rows.column_names)))
    return [
        {name: value for name, value in row.items() if not name.startswith(META_PREFIX)}
        if isinstance(row, Mapping)
        else row
        for row in rows
    ]
