"""
The library of combine functions.

Counts, sums and lists take elements back as they are. `Min`, `Max` and `TopN` remember only
the best unless they are told that elements may be retracted; then they remember all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from millpond.dataflow.combiners.combine_fn import CombineFn, ValueExtractor, check_extractor, extract
from millpond.statestore.errors import InvalidError

__all__ = ["Count", "CountDistinct", "Max", "Mean", "Min", "Quantiles", "Sum", "ToList", "TopN"]


class _OfValue(CombineFn):
    """
    A combine function of a field, of a function of the value, or of the value itself.
    """

    of: ValueExtractor

    def __post_init__(self) -> None:
        """
        Refuse what cannot be taken from a value while the caller is still near.
        """
        check_extractor(self.of)


@dataclass(frozen=True)
class Count(CombineFn):
    """
    How many elements there are.
    """

    def create(self) -> int:
        """
        None yet.
        """
        return 0

    def add(self, accumulator: int, value: Any) -> int:  # noqa: ARG002 - whatever it is
        """
        One more.
        """
        return accumulator + 1

    def add_all(self, accumulator: int, values: Iterable[Any]) -> int:
        """
        As many more.
        """
        return accumulator + sum(1 for _ in values)

    def merge(self, accumulators: Sequence[int]) -> int:
        """
        All of them.
        """
        return sum(accumulators)

    def uncombine(self, accumulator: int, value: Any) -> int:  # noqa: ARG002 - whatever it is
        """
        One less.
        """
        return accumulator - 1


@dataclass(frozen=True)
class Sum(_OfValue):
    """
    The sum of numbers.
    """

    of: ValueExtractor = None

    def create(self) -> int | float:
        """
        Nothing yet.
        """
        return 0

    def add(self, accumulator: Any, value: Any) -> Any:
        """
        Add the number.
        """
        return accumulator + extract(self.of, value)

    def merge(self, accumulators: Sequence[Any]) -> Any:
        """
        The sum of sums.
        """
        return sum(accumulators)

    def uncombine(self, accumulator: Any, value: Any) -> Any:
        """
        Take the number off.
        """
        return accumulator - extract(self.of, value)


@dataclass(frozen=True)
class Mean(_OfValue):
    """
    The mean of numbers; ``None`` when there are none.
    """

    of: ValueExtractor = None

    def create(self) -> list[Any]:
        """
        Sum and count.
        """
        return [0, 0]

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        Add the number.
        """
        return [accumulator[0] + extract(self.of, value), accumulator[1] + 1]

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        """
        The sums of sums and counts.
        """
        return [sum(one[0] for one in accumulators), sum(one[1] for one in accumulators)]

    def extract(self, accumulator: list[Any]) -> float | None:
        """
        Their quotient.
        """
        return accumulator[0] / accumulator[1] if accumulator[1] else None

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        Take the number off.
        """
        return [accumulator[0] - extract(self.of, value), accumulator[1] - 1]


def _without(elements: list[Any], value: Any) -> list[Any]:
    if value not in elements:
        raise InvalidError("an element is taken back that had not come", value=value)
    rest = list(elements)
    rest.remove(value)
    return rest


@dataclass(frozen=True)
class ToList(_OfValue):
    """
    All elements, in the order in which they came.
    """

    of: ValueExtractor = None

    def create(self) -> list[Any]:
        """
        None yet.
        """
        return []

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        One more.
        """
        accumulator.append(extract(self.of, value))
        return accumulator

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        """
        One list after the other.
        """
        return [value for accumulator in accumulators for value in accumulator]

    def extract(self, accumulator: list[Any]) -> Any:
        """
        The elements.
        """
        return list(accumulator)

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        One less.
        """
        return _without(accumulator, extract(self.of, value))


@dataclass(frozen=True)
class TopN(_OfValue):
    """
    The ``count`` greatest, the greatest first.

    Args:
        count: how many.
        of: what of an element is compared and kept.
        smallest: the least instead.
        retractable: keep all elements, so that they can be taken back.

    Raises:
        InvalidError: a count below 1.
    """

    count: int
    of: ValueExtractor = None
    smallest: bool = False
    retractable: bool = False

    def __post_init__(self) -> None:
        """
        Refuse a count that cannot work while the caller is still near.
        """
        check_extractor(self.of)
        if self.count < 1:
            raise InvalidError("a top list has at least one place", count=self.count)

    @property
    def can_uncombine(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere
        """
        Whether all elements are kept.
        """
        return self.retractable

    def create(self) -> list[Any]:
        """
        None yet.
        """
        return []

    def _kept(self, values: list[Any]) -> list[Any]:
        values.sort(reverse=not self.smallest)
        return values if self.retractable else values[: self.count]

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        Give it its place, if it has one.
        """
        return self._kept([*accumulator, extract(self.of, value)])

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        """
        Give all of them their places at once.
        """
        return self._kept([*accumulator, *(extract(self.of, value) for value in values)])

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        """
        The best of all.
        """
        return self._kept([value for accumulator in accumulators for value in accumulator])

    def extract(self, accumulator: list[Any]) -> Any:
        """
        The best.
        """
        return accumulator[: self.count]

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        """
        Take it off the list.

        Raises:
            InvalidError: only the best were kept.
        """
        if not self.retractable:
            raise InvalidError("give the combiner retractable=True to take elements back", combiner=self)
        return _without(accumulator, extract(self.of, value))


@dataclass(frozen=True)
class Max(TopN):
    """
    The greatest; ``None`` when there is none.
    """

    count: int = field(default=1, init=False, repr=False)

    def extract(self, accumulator: list[Any]) -> Any:
        """
        The first of the list.
        """
        return accumulator[0] if accumulator else None


@dataclass(frozen=True)
class Min(Max):
    """
    The least; ``None`` when there is none.
    """

    smallest: bool = field(default=True, init=False, repr=False)


@dataclass(frozen=True)
class CountDistinct(_OfValue):
    """
    How many different values there are, exactly: memory grows with them.
    """

    of: ValueExtractor = None

    def create(self) -> dict[str, int]:
        """
        None yet.
        """
        return {}

    def _name(self, value: Any) -> str:
        return orjson.dumps(extract(self.of, value), option=orjson.OPT_SORT_KEYS).decode()

    def add(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        """
        One more of its kind.
        """
        name = self._name(value)
        accumulator[name] = accumulator.get(name, 0) + 1
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, int]]) -> dict[str, int]:
        """
        The kinds of all.
        """
        merged: dict[str, int] = {}
        for accumulator in accumulators:
            for name, count in accumulator.items():
                merged[name] = merged.get(name, 0) + count
        return merged

    def extract(self, accumulator: dict[str, int]) -> int:
        """
        How many kinds.
        """
        return sum(count > 0 for count in accumulator.values())

    def uncombine(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        """
        One less of its kind.
        """
        name = self._name(value)
        accumulator[name] = accumulator.get(name, 0) - 1
        if not accumulator[name]:
            del accumulator[name]
        return accumulator


@dataclass(frozen=True)
class Quantiles(ToList):
    """
    Exact quantiles of numbers, by nearest rank; memory grows with the elements.

    Args:
        of: what of an element is ranked.
        at: which quantiles, from 0 to 1.

    Raises:
        InvalidError: a quantile out of bounds.
    """

    at: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        """
        Refuse quantiles that cannot be while the caller is still near.
        """
        check_extractor(self.of)
        for one in self.at:
            if not 0 <= one <= 1:
                raise InvalidError("a quantile lies between 0 and 1", quantile=one)

    def extract(self, accumulator: list[Any]) -> list[Any] | None:
        """
        One number for each quantile; ``None`` when there are no elements.
        """
        if not accumulator:
            return None
        ranked, last = sorted(accumulator), len(accumulator) - 1
        return [ranked[min(max(math.ceil(one * len(ranked)) - 1, 0), last)] for one in self.at]
