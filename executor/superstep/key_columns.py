"""The columns of typed keys: recorded with the first input that shows them, and required from then on.

A store finds a row by the text of its key, so a key of other columns or types would find no row. Names and types are
recorded in the table, one word by computation, so that views can show the keys' values. A computation without a
record has plain keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from millpond.executor.inputs.extraction import Rows
from millpond.executor.inputs.keys import KeyExtractor, key_names
from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import key_columns_app_id
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.key_columns import (
    key_columns_in,
    key_columns_of,
    key_word,
    same_texts,
    told_kind,
)
from millpond.statestore.rows.key_text import is_typed
from millpond.statestore.store import Store

ROWS_READ: Final = 100
"""Number of mappings whose values determine the types of their fields."""

_WAYS_OUT: Final = (
    "take the former key= again, or start a computation of another name and drop= this one in the pipeline, or begin with a "
    "new store"
)


class KeyColumns:
    """The columns of a pipeline's typed keys: recorded at first sight, and required to stay the same."""

    def __init__(self, store: Store, topology: Topology, ownership: Ownership) -> None:
        self._store = store
        self._topology = topology
        self._ownership = ownership
        self._seen: dict[tuple[str, str | None], tuple[pa.Field, ...]] = {}

    def record(self, stream: str, rows: Rows, only: str | None = None) -> None:
        """Record the key columns of some outside rows, before the rows are read.

        Args:
            stream: the injected stream.
            rows: a table, whose schema counts, or mappings, of which the first `ROWS_READ` count.
            only: the only computation that gets the rows; ``None`` for all consumers.

        """
        seen = self._seen.get((stream, only))
        if seen is not None and (not isinstance(rows, pa.Table) or seen == tuple(rows.schema)):
            return
        if isinstance(rows, pa.Table):
            self.record_columns(stream, tuple(rows.schema), only)
        elif rows:
            names = {name for key in self._keys(stream, only).values() for name in key_names(key)}
            fields = tuple(_guessed(name, rows) for name in sorted(names))
            self.record_columns(stream, fields, only)
            if any(pa.types.is_null(field.type) for field in fields):
                del self._seen[stream, only]

    def is_known(self, stream: str, only: str | None = None) -> bool:
        """Return True if columns of a stream have been recorded in this run."""
        return (stream, only) in self._seen

    def record_columns(self, stream: str, columns: Sequence[pa.Field], only: str | None = None) -> None:
        """Record the columns of keys among ``columns``; see `record`."""
        by_name = {column.name: column for column in columns}
        snapshot = self._store.committer.snapshot
        records: dict[str, int] = {}
        for computation, key in self._keys(stream, only).items():
            names = key_names(key)
            if names and by_name.keys() >= set(names):
                given = key_columns_of(by_name[name] for name in names)
                is_plain = isinstance(key, str) and pa.types.is_string(given[0].type)
                word = self._checked(snapshot, computation, stream, given, is_plain=is_plain)
                if word is not None:
                    records[key_columns_app_id(computation, word)] = snapshot.version + 1
        if records:
            self._ownership.record(records)
        self._seen[stream, only] = tuple(columns)

    def _keys(self, stream: str, only: str | None) -> Mapping[str, KeyExtractor]:
        own = self._topology.injectors[stream].key
        return {
            consumer.computation.name: own if consumer.subscription.key is None else consumer.subscription.key
            for consumer in self._topology.consumers_of(stream)
            if only in (None, consumer.computation.name)
        }

    def _checked(
        self, snapshot: Snapshot, name: str, stream: str, given: tuple[pa.Field, ...], *, is_plain: bool
    ) -> str | None:
        """Return the word to record, unless the table has it or the key is plain."""
        stored = key_columns_in(snapshot.txns, name)
        if is_plain or (len(given) == 1 and not stored and pa.types.is_null(given[0].type)):
            if is_plain and stored:
                raise _refused(
                    "the computation's rows have typed keys, and its key is text now", name, stored, given
                )
            return None
        if not stored:
            if _has_plain_keys(snapshot, name):
                raise _refused(
                    "the computation's rows have plain text as keys, and its key is typed now",
                    name,
                    (),
                    given,
                )
            return key_word(given)
        if len(stored) != len(given):
            raise _refused(
                "the computation's key is made of another number of columns now", name, stored, given
            )
        for before, now in zip(stored, given, strict=True):
            if not same_texts(before.type, now.type):
                raise _refused("a column of the computation's key has another type now", name, stored, given)
        wanted = tuple(
            now if not pa.types.is_null(now.type) else now.with_type(before.type)
            for before, now in zip(stored, given, strict=True)
        )
        is_first = self._topology.computations[name].rank(stream) == 0
        is_told = any(pa.types.is_null(before.type) for before in stored)
        return key_word(wanted) if wanted != stored and (is_first or is_told) else None


def _refused(
    what: str, computation: str, stored: Sequence[pa.Field], given: Sequence[pa.Field]
) -> InvalidError:
    return InvalidError(
        f"{what}, so they would not be found: {_WAYS_OUT}",
        computation=computation,
        **({"stored": key_word(stored)} if stored else {}),
        key=key_word(given),
    )


def _has_plain_keys(snapshot: Snapshot, computation: str) -> bool:
    bounds = (bound for file in snapshot.files_in(computation) for bound in (file.min_key, file.max_key))
    return any(bound is not None and not is_typed(bound) for bound in bounds)


def _guessed(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Field:
    return pa.field(
        name, told_kind(row.get(name) for row in islice(rows, ROWS_READ) if isinstance(row, Mapping))
    )
