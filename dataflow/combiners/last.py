"""Windows by count that slide: the last so many elements of a window, combined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from millpond.dataflow.combiners.combine_fn import CombineFn
from millpond.dataflow.combiners.combiners import ToList
from millpond.statestore.errors import InvalidError


class LastN(CombineFn):
    """Combines the last ``n`` elements, in the order of arrival.

    With a trigger that fires every so many elements it makes sliding windows by count: with
    ``Repeatedly(AfterCount(10))``, accumulating, each pane is of the last ``n`` elements, after every ten.
    It keeps these elements, and combines them for each pane. Of windows that merge, the elements count as
    having come in the order of the windows. There is no taking back, since an element that has left the
    last ``n`` is gone.

    Args:
        n: number of elements, at least 1.
        combine: what is made of them; by default their list.

    Raises:
        InvalidError: ``n`` is not an integer of at least 1, or ``combine`` is no `CombineFn`.

    Example:
        >>> last = LastN(2)
        >>> last.extract(last.add_all(last.create(), [1, 2, 3]))
        [2, 3]
    """

    can_uncombine = False

    def __init__(self, n: int, combine: CombineFn | None = None) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InvalidError("a number of elements must be an integer of at least 1", value=n)
        if combine is not None and not isinstance(combine, CombineFn):
            raise InvalidError("LastN takes an instance of a CombineFn", combine=combine)
        self.n = n
        self.combine: CombineFn = ToList() if combine is None else combine

    def create(self) -> list[Any]:
        """No elements."""
        return []

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        """Append the value, and drop the oldest if there are too many."""
        return self.add_all(accumulator, (value,))

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        """Append the values, and drop the oldest if there are too many."""
        accumulator.extend(values)
        del accumulator[: -self.n]
        return accumulator

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        """The last of all, in the order of the accumulators."""
        return [value for accumulator in accumulators for value in accumulator][-self.n :]

    def extract(self, accumulator: list[Any]) -> Any:
        """The combined value of the elements that are left."""
        return self.combine.extract(self.combine.add_all(self.combine.create(), accumulator))
