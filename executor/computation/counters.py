"""
Counters: numbers that user code keeps of a computation as a whole, beside the state of its keys.

They are sums over all keys and all time, exact like state (a count stands if and only if the
superstep in which it was made was committed), and bounded: a computation declares their names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from millpond.statestore.errors import InvalidError

__all__ = ["AMOUNT_MAX", "COUNTERS_MAX", "Counters", "declared_counters"]

AMOUNT_MAX: Final = 2**40
"""So much may be added at once: sums are positions of the table, which never fall and have 64 bits."""

COUNTERS_MAX: Final = 32
"""So many counters may a computation declare."""


def declared_counters(declared: object, computation: str) -> tuple[str, ...]:
    """
    The counters that a computation declares.

    Raises:
        InvalidError: they are no names, or too many.
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
    """
    What a bundle counts; counts of a hook that failed are taken back.
    """

    __slots__ = ("_entries", "_sums")

    def __init__(self) -> None:
        self._entries: list[tuple[str, int]] = []
        self._sums: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, name: str, amount: int) -> None:
        """
        Count; `truncate` can take it back until `settle`.
        """
        self._entries.append((name, amount))

    def truncate(self, length: int) -> None:
        """
        Take back all but the first ``length`` since `settle`.
        """
        del self._entries[length:]

    def settle(self) -> None:
        """
        The key's turn is over: what was counted stands.
        """
        if self._entries:
            for name, amount in self._entries:
                self._sums[name] += amount
            self._entries.clear()

    def sums(self) -> Mapping[str, int]:
        """
        What stands.
        """
        self.settle()
        return dict(self._sums)
