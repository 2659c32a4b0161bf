"""Bounded inputs of the local runner that are read piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain

import pyarrow as pa

from millpond.executor.inputs.extraction import (
    InjectorNode,
    Rows,
    pieces,
    row_count,
    rows_between,
    rows_to_extract,
)


class RowSource(ABC):
    """A bounded input of which only a piece is in memory; each reading gives the same rows in the same order."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of rows."""

    @abstractmethod
    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """Yield the rows after the first ``start``, in pieces of at most ``records_max``, each with its number of rows.

        The same arguments give the same pieces.

        Raises:
            MillpondError: the rows can no longer be read.
        """

    def offsets(self, count: int) -> str | None:
        """Return the end of the first ``count`` rows in the source's own words, which the commit stores; ``None``: by count."""
        del count
        return None

    def check_offsets(self, count: int, stored: str) -> None:
        """Refuse a source whose first ``count`` rows no longer end at their stored offsets.

        Args:
            count: number of rows that the store has consumed.
            stored: the result of `offsets` at that time.

        Raises:
            InvalidError: rows were added or removed before that place.
        """
        del count, stored

    def first(self, records_max: int) -> Rows:
        """Return the first rows, at most ``records_max``."""
        return next((rows for _, rows in self.pieces(0, records_max)), [])

    def all_rows(self, records_max: int) -> Rows:
        """Read all rows into memory, in pieces of ``records_max``."""
        read = [rows for _, rows in self.pieces(0, records_max)]
        tables = [rows for rows in read if isinstance(rows, pa.Table)]
        if tables and len(tables) == len(read) and all(one.schema == tables[0].schema for one in tables):
            return pa.concat_tables(tables)
        return [
            *chain.from_iterable(rows.to_pylist() if isinstance(rows, pa.Table) else rows for rows in read)
        ]


class RowsInMemory(RowSource):
    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def count(self) -> int:
        return row_count(self._rows)

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        return pieces(rows_between(self._rows, start, self.count), records_max)


def source_of(rows: Rows | RowSource) -> RowSource:
    return rows if isinstance(rows, RowSource) else RowsInMemory(rows)


class DecodedSource(RowSource):
    """Rows whose payload is decoded when a piece is read."""

    def __init__(self, source: RowSource, injector: InjectorNode) -> None:
        self._source = source
        self._injector = injector

    @property
    def count(self) -> int:
        return self._source.count

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        for count, rows in self._source.pieces(start, records_max):
            yield count, rows_to_extract(self._injector, rows)

    def offsets(self, count: int) -> str | None:
        return self._source.offsets(count)

    def check_offsets(self, count: int, stored: str) -> None:
        self._source.check_offsets(count, stored)
