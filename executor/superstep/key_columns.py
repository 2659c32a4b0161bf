"""The columns that typed keys are made of: recorded with the first input that shows them, and held to from then on.

A store finds a row by the text of its key, so a key of other columns or types than before would find no row. Names and
types are recorded in the table, one word by computation, so that views show the keys' values; a computation without a
record has plain keys, as all had before there were typed ones.
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
from millpond.statestore.app_ids import AppId
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
"""Of so many rows that are no part of a table types are told."""

_WAYS_OUT: Final = (
    "take the former key= again, or start a computation of another name and drop= this one in the pipeline, or begin with a "
    "new store"
)


class KeyColumns:
    """Records what a pipeline's typed keys are made of, and refuses what its rows could not be found by.

    Args:
        store: the open store.
        topology: the checked pipeline.
        ownership: commits the records.
    """

    def __init__(self, store: Store, topology: Topology, ownership: Ownership) -> None:
        self._store = store
        self._topology = topology
        self._ownership = ownership
        self._seen: dict[tuple[str, str | None], tuple[pa.Field, ...]] = {}

    def note(self, stream: str, rows: Rows, only: str | None = None) -> None:
        """Take in the columns of some outside rows, before anything else happens to them.

        Args:
            stream: the injected stream.
            rows: the rows; of a table, its columns count, and of mappings the first ones.
            only: the only computation that gets them; ``None`` for all.

        Raises:
            InvalidError: the store has rows of a consumer under keys of another kind, or a column of its key has another
                type than before.
        """
        seen = self._seen.get((stream, only))
        if seen is not None and (not isinstance(rows, pa.Table) or seen == tuple(rows.schema)):
            return
        if isinstance(rows, pa.Table):
            self.note_columns(stream, tuple(rows.schema), only)
        elif rows:
            names = {name for key in self._keys(stream, only).values() for name in key_names(key)}
            fields = tuple(_told(name, rows) for name in sorted(names))
            self.note_columns(stream, fields, only)
            if any(pa.types.is_null(field.type) for field in fields):
                del self._seen[stream, only]

    def is_known(self, stream: str, only: str | None = None) -> bool:
        """Whether columns of a stream have been taken in already."""
        return (stream, only) in self._seen

    def note_columns(self, stream: str, columns: Sequence[pa.Field], only: str | None = None) -> None:
        """Take in the columns of outside rows, of which only those of keys are looked at.

        Raises:
            InvalidError: as `note` says.
        """
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
                    records[AppId.KEY_COLUMNS.of(computation, word)] = snapshot.version + 1
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
        """The word to record; ``None`` if the table has it, or if there is none."""
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


def _told(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Field:
    return pa.field(
        name, told_kind(row.get(name) for row in islice(rows, ROWS_READ) if isinstance(row, Mapping))
    )
