"""The part of an input that a replay needs, under the numbers that its rows had in the original."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from millpond.executor.local.row_source import RowSource
from millpond.executor.pipeline.extract_rows import Rows

_PIECE_RECORDS = 20_000


class InputPart(RowSource):
    """Rows of which those in front are missing, or which ends before its end; rows keep their numbers.

    Args:
        source: the rows that there are.
        begins: the number of the first of them.
        ends: the number of the first that does not belong to it.
    """

    def __init__(self, source: RowSource, begins: int, ends: int) -> None:
        self._source = source
        self._begins = begins
        self._ends = ends

    @property
    def count(self) -> int:
        """How many rows the original had consumed at its end, with those that are missing in front."""
        return self._ends

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows from a number on, in pieces."""
        left = self._ends - start
        for count, rows in self._source.pieces(max(start - self._begins, 0), records_max):
            if left <= 0:
                return
            if count > left:
                yield left, rows.slice(0, left) if isinstance(rows, pa.Table) else rows[:left]
                return
            yield count, rows
            left -= count

    def first(self, records_max: int) -> Rows:
        """The first rows that there are, at most so many."""
        return self._source.first(records_max)


class InputCursor:
    """Reads a source from front to back, as many rows at a time as are asked for.

    Args:
        source: the rows.
        start: the number of the first to be read.
    """

    def __init__(self, source: RowSource, start: int) -> None:
        self._pieces = source.pieces(start, _PIECE_RECORDS)
        self._rows: Rows = []
        self._left = 0

    def take(self, count: int) -> Iterator[Rows]:
        """The next rows, in one piece or more: all that there are, if these are fewer."""
        while count:
            if not self._left:
                self._left, self._rows = next(self._pieces, (0, []))
                if not self._left:
                    return
            taken = min(count, self._left)
            if isinstance(self._rows, pa.Table):
                yield self._rows.slice(0, taken)
                self._rows = self._rows.slice(taken)
            else:
                yield self._rows[:taken]
                self._rows = self._rows[taken:]
            self._left -= taken
            count -= taken
