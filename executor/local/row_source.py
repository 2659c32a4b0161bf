"""Rows that are read piece by piece, as often as they are needed: they may be more than fit into memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import chain

import pyarrow as pa

from millpond.executor.local.rows import pieces
from millpond.executor.payloads.decoded_rows import rows_to_extract
from millpond.executor.pipeline.extract_rows import Rows, row_count
from millpond.executor.pipeline.injector_node import InjectorNode


class RowSource(ABC):
    """A bounded input of which only a piece is in memory: the same rows in the same order, each time they are read."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows after the first ``start``, in pieces of at most ``records_max``, each with its number of rows.

        The same arguments give the same pieces.

        Raises:
            MillpondError: the rows can no longer be read.
        """

    def offsets(self, count: int) -> str | None:
        """Where the first ``count`` rows end, in words of the source, for the commit that consumes them; ``None``: by count."""
        del count
        return None

    def check_offsets(self, count: int, stored: str) -> None:
        """Refuse a source whose first ``count`` rows do not end where they once did.

        Args:
            count: how many rows the store has consumed.
            stored: what `offsets` said of them then.

        Raises:
            InvalidError: rows have come or gone before that place.
        """
        del count, stored

    def first(self, records_max: int) -> Rows:
        """The first rows, at most so many."""
        return next((rows for _, rows in self.pieces(0, records_max)), [])

    def all_rows(self, records_max: int) -> Rows:
        """All rows in memory, for what needs to see them at once.

        Args:
            records_max: how many to read at a time.
        """
        read = [rows for _, rows in self.pieces(0, records_max)]
        tables = [rows for rows in read if isinstance(rows, pa.Table)]
        if tables and len(tables) == len(read) and all(one.schema == tables[0].schema for one in tables):
            return pa.concat_tables(tables)
        return [
            *chain.from_iterable(rows.to_pylist() if isinstance(rows, pa.Table) else rows for rows in read)
        ]


class RowsInMemory(RowSource):
    """Rows that the caller has in memory.

    Args:
        rows: the rows.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def count(self) -> int:
        """How many rows there are."""
        return row_count(self._rows)

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows after the first ``start``, in pieces; nothing is copied of a table."""
        rest = self._rows.slice(start) if isinstance(self._rows, pa.Table) else self._rows[start:]
        return pieces(rest, records_max)


def source_of(rows: Rows | RowSource) -> RowSource:
    """Rows as a source of rows."""
    return rows if isinstance(rows, RowSource) else RowsInMemory(rows)


class DecodedSource(RowSource):
    """Rows with their payload decoded, piece by piece as they are read.

    Args:
        source: the rows as they came.
        injector: says what decodes them.
    """

    def __init__(self, source: RowSource, injector: InjectorNode) -> None:
        self._source = source
        self._injector = injector

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self._source.count

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows after the first ``start``, in pieces of at most ``records_max``, decoded."""
        for count, rows in self._source.pieces(start, records_max):
            yield count, rows_to_extract(self._injector, rows)

    def offsets(self, count: int) -> str | None:
        """Where the first ``count`` rows end, in words of the source."""
        return self._source.offsets(count)

    def check_offsets(self, count: int, stored: str) -> None:
        """Refuse a source whose first ``count`` rows do not end where they once did."""
        self._source.check_offsets(count, stored)
