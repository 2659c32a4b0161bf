"""Bounded inputs of the local runner that are read piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from millpond.executor.inputs.payload import python_rows
from millpond.statestore.log.action import JsonValue


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

    def read(self, rows: Rows) -> Rows:
        """Return rows of a piece as the pipeline takes them, for example decoded; as they are by default."""
        return rows

    def read_pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """Yield the pieces as the pipeline takes them; see `pieces`."""
        return ((count, self.read(rows)) for count, rows in self.pieces(start, records_max))

    def place(self, count: int) -> Mapping[str, JsonValue]:
        """Return the end of the first ``count`` rows in the source's own words, which each commit stores: keep it small."""
        del count
        return {}

    def part_ends(self, start: int, stop: int) -> Sequence[int]:
        """Return the numbers of rows from ``start`` to before ``stop`` with which a part of the source ends, such as a file."""
        del start, stop
        return ()

    def resume(self, count: int, place: Mapping[str, JsonValue]) -> int:
        """Return how many of the ``count`` consumed rows are known to be the same without reading them.

        It is called before anything is read, so that a source may leave them out.

        Args:
            count: number of rows that the store has consumed.
            place: the result of `place` at that time, with the digest of the rows; empty if it was not recorded.
        """
        del count, place
        return 0

    def first(self, records_max: int) -> Rows:
        """Return the first rows, at most ``records_max``."""
        return next((rows for _, rows in self.read_pieces(0, records_max)), [])

    def all_rows(self, records_max: int) -> Rows:
        """Read all rows into memory, in pieces of ``records_max``."""
        read = [rows for _, rows in self.read_pieces(0, records_max)]
        tables = [rows for rows in read if isinstance(rows, pa.Table)]
        if tables and len(tables) == len(read) and all(one.schema == tables[0].schema for one in tables):
            return pa.concat_tables(tables)
        return [
            *chain.from_iterable(python_rows(rows) if isinstance(rows, pa.Table) else rows for rows in read)
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


class SourceOf(RowSource):
    """Another source, of which a subclass changes something."""

    def __init__(self, source: RowSource) -> None:
        self._source = source

    @property
    def count(self) -> int:
        return self._source.count

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        return self._source.pieces(start, records_max)

    def read(self, rows: Rows) -> Rows:
        return self._source.read(rows)

    def place(self, count: int) -> Mapping[str, JsonValue]:
        return self._source.place(count)

    def part_ends(self, start: int, stop: int) -> Sequence[int]:
        return self._source.part_ends(start, stop)

    def resume(self, count: int, place: Mapping[str, JsonValue]) -> int:
        return self._source.resume(count, place)


class DecodedSource(SourceOf):
    """Rows whose payload is decoded when a piece is read."""

    def __init__(self, source: RowSource, injector: InjectorNode) -> None:
        super().__init__(source)
        self._injector = injector

    def read(self, rows: Rows) -> Rows:
        return rows_to_extract(self._injector, self._source.read(rows))
