"""Counters: sums that user code keeps for a computation as a whole, next to the state of its keys.

A counter adds up all keys over the pipeline's whole life. It is exact, as state is: an addition counts
if and only if its superstep is committed. The number of counters is bounded: a computation declares
their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from millpond.statestore.errors import InvalidError

AMOUNT_MAX: Final = 2**40
"""The most that one call may add: sums are positions of the table, which never fall and have 64 bits."""

COUNTERS_MAX: Final = 32
"""The most counters that a computation may declare."""


def declared_counters(declared: object, computation: str) -> tuple[str, ...]:
    """The counters that a computation declares.

    Raises:
        InvalidError: ``declared`` is not a collection of names, or has more than `COUNTERS_MAX`.
    """
    if not isinstance(declared, tuple | list | frozenset | set):
        raise InvalidError("counters is a tuple of names", computation=computation, found=declared)
    for name in declared:
        if not isinstance(name, str) or not name:
            raise InvalidError("a counter's name is text", computation=computation, found=name)
    if len(declared) > COUNTERS_MAX:
        raise InvalidError("too many counters", computation=computation, counters_max=COUNTERS_MAX)
    return tuple(declared)


class Counters:
    """The additions of one bundle; those of a failing hook are rolled back."""

    __slots__ = ("_entries", "_sums")

    def __init__(self) -> None:
        self._entries: list[tuple[str, int]] = []
        self._sums: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, amount: int) -> None:
        """Add to a counter; `truncate` can undo it until `settle`."""
        self._entries.append((name, amount))

    def has(self, name: str, since: int) -> bool:
        """Whether a counter was added to after the first ``since`` additions since `settle`."""
        return any(added == name and amount for added, amount in self._entries[since:])

    def truncate(self, length: int) -> None:
        """Undo all but the first ``length`` additions since `settle`."""
        del self._entries[length:]

    def settle(self) -> None:
        """Make the additions of the key's turn final."""
        if self._entries:
            for name, amount in self._entries:
                self._sums[name] += amount
            self._entries.clear()

    def sums(self) -> Mapping[str, int]:
        """The final sums by counter."""
        self.settle()
        return dict(self._sums)
