"""Combine functions: the incremental aggregation of a window's elements into one value (Beam's ``CombineFn``).

An accumulator is plain JSON data: it lies in the row's state. `CombineFn.merge` joins accumulators, so
windows can merge. `CombineFn.uncombine` removes an element, so retractions pass through aggregations. Counts,
sums and lists support retractions. `Min`, `Max` and `TopN` keep only the best elements, unless ``retractable``
is set; then they keep all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, TypeAlias

import orjson

from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.windows.exact_sum import (
    Total,
    merged,
    number_of,
    quotient,
    with_numbers,
    without,
)
from millpond.statestore.arguments import check_count, check_flags, check_number
from millpond.statestore.errors import InvalidError, did_you_mean
from millpond.statestore.rows.value_text import TYPED_MARK, encode_value

ValueExtractor: TypeAlias = str | Callable[[Any], Any] | None
"""The part of an element that is combined: a field name, a function of the value, or ``None`` for the whole value."""


def check_extractor(of: object) -> None:
    if not (of is None or callable(of) or (isinstance(of, str) and of)):
        raise InvalidError("a combiner takes a field, a function of the value or None", of=of)


def extract(of: ValueExtractor, value: Any) -> Any:
    if of is None:
        return value
    if callable(of):
        return of(value)
    if isinstance(value, Mapping) and of in value:
        return value[of]
    if isinstance(value, Mapping):
        hint = did_you_mean(of, value)
        raise InvalidError(f"the value has no such field{hint}", field=of, fields=sorted(map(str, value)))
    raise InvalidError("the value has no such field", field=of, type=type(value).__name__)


class CombineFn:
    """Base class of combine functions; all state between elements is in the accumulator.

    Override `create`, `add` and `merge`; `extract` if the combined value is not the accumulator
    itself, and `uncombine` if the function has an inverse.

    Example:
        >>> class Longest(CombineFn):
        ...     can_uncombine = False
        ...     def create(self):
        ...         return ""
        ...     def add(self, accumulator, value):
        ...         return max(accumulator, value, key=len)
        ...     def merge(self, accumulators):
        ...         return max(accumulators, key=len)
        >>> Longest().add_all("", ["a", "abc", "ab"])
        'abc'
    """

    can_uncombine: bool = True
    """Whether `uncombine` is supported."""

    version: ClassVar[int] = 0
    """Raise it when the accumulators of earlier code mean something else; a store that has some then refuses the code."""

    def create(self) -> Any:
        """Return the accumulator of no elements."""
        raise NotImplementedError

    def add(self, accumulator: Any, value: Any) -> Any:
        """Return the accumulator with ``value`` added; may modify and return the given one."""
        raise NotImplementedError

    def add_all(self, accumulator: Any, values: Iterable[Any]) -> Any:
        """Return the accumulator with all ``values`` added; override it where a bundle can be added faster."""
        for value in values:
            accumulator = self.add(accumulator, value)
        return accumulator

    def merge(self, accumulators: Sequence[Any]) -> Any:
        """Return one accumulator from one or more; may modify and return one of the given."""
        raise NotImplementedError

    def extract(self, accumulator: Any) -> Any:
        """Return the combined value of an accumulator; by default the accumulator itself."""
        return accumulator

    def uncombine(self, accumulator: Any, value: Any) -> Any:  # noqa: ARG002 - for subclasses
        """Return the accumulator with one earlier ``value`` removed, or refuse; may modify and return the given one."""
        raise InvalidError("this combiner does not support retractions", combiner=type(self).__name__)

    def uncombine_if_held(self, accumulator: Any, value: Any) -> tuple[Any, bool]:
        """Retract a value that an earlier pane may have shown and cleared; return the accumulator, and True if it changed.

        Called in place of `uncombine` where panes clear the window's contents. By default numbers go below zero,
        so that panes still add up. A list, which refuses a value that it does not hold, stays unchanged instead.
        """
        return self.uncombine(accumulator, value), True


@dataclass(frozen=True)
class CombineFields(CombineFn):
    """Several combine functions at once; the combined value is an object with a field for each.

    A field added to the pipeline after a window began combines the elements since then.

    Example:
        >>> both = CombineFields({"total": Sum("amount"), "visits": Count()})
        >>> both.extract(both.add_all(both.create(), [{"amount": 3}, {"amount": 4}]))
        {'total': 7, 'visits': 2}
    """

    fields: Mapping[str, CombineFn]

    def __post_init__(self) -> None:
        if not self.fields:
            raise InvalidError("several combiners have at least one field")
        for name, combine in self.fields.items():
            if not isinstance(name, str) or not name:
                raise InvalidError("a combiner's field is named by text", field=name)
            if not isinstance(combine, CombineFn):
                raise InvalidError("a field takes an instance of a CombineFn", field=name, combine=combine)
            check_overrides(CombineFn, combine, field=name)

    @property
    def can_uncombine(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere
        return all(combine.can_uncombine for combine in self.fields.values())

    def _parts(self, accumulator: Mapping[str, Any]) -> Iterator[tuple[str, CombineFn, Any]]:
        for name, combine in self.fields.items():
            yield name, combine, accumulator[name] if name in accumulator else combine.create()

    def create(self) -> dict[str, Any]:
        return {name: combine.create() for name, combine in self.fields.items()}

    def add(self, accumulator: dict[str, Any], value: Any) -> dict[str, Any]:
        return {name: combine.add(part, value) for name, combine, part in self._parts(accumulator)}

    def add_all(self, accumulator: dict[str, Any], values: Iterable[Any]) -> dict[str, Any]:
        elements = list(values)
        return {name: combine.add_all(part, elements) for name, combine, part in self._parts(accumulator)}

    def merge(self, accumulators: Sequence[dict[str, Any]]) -> dict[str, Any]:
        opened = [{name: part for name, _, part in self._parts(one)} for one in accumulators]
        return {
            name: combine.merge([parts[name] for parts in opened]) for name, combine in self.fields.items()
        }

    def extract(self, accumulator: dict[str, Any]) -> dict[str, Any]:
        return {name: combine.extract(part) for name, combine, part in self._parts(accumulator)}

    def uncombine(self, accumulator: dict[str, Any], value: Any) -> dict[str, Any]:
        return {name: combine.uncombine(part, value) for name, combine, part in self._parts(accumulator)}

    def uncombine_if_held(self, accumulator: dict[str, Any], value: Any) -> tuple[dict[str, Any], bool]:
        changed = {
            name: combine.uncombine_if_held(part, value) for name, combine, part in self._parts(accumulator)
        }
        rest = {name: part for name, (part, _) in changed.items()}
        return rest, any(has_effect for _, has_effect in changed.values())


class OfValue(CombineFn):
    """A combine function of a field, of a function of the value, or of the whole value.

    Subclasses override `add` or `add_all`.
    """

    of: ValueExtractor

    def __post_init__(self) -> None:
        check_extractor(self.of)

    def add(self, accumulator: Any, value: Any) -> Any:
        return self.add_all(accumulator, (value,))


def check_quantiles(quantiles: object) -> None:
    if not isinstance(quantiles, list | tuple) or not quantiles:
        raise InvalidError("at must be a list of quantiles, such as [0.5]", at=quantiles)
    for quantile in quantiles:
        check_number("a quantile", quantile, least=0, most=1)


@dataclass(frozen=True)
class Count(CombineFn):
    """Number of elements."""

    def create(self) -> int:
        return 0

    def add(self, accumulator: int, value: Any) -> int:  # noqa: ARG002 - any value counts
        return accumulator + 1

    def add_all(self, accumulator: int, values: Iterable[Any]) -> int:
        return accumulator + sum(1 for _ in values)

    def merge(self, accumulators: Sequence[int]) -> int:
        return sum(accumulators)

    def uncombine(self, accumulator: int, value: Any) -> int:  # noqa: ARG002 - any value counts
        return accumulator - 1


@dataclass(frozen=True)
class Sum(OfValue):
    """Exact sum of whole numbers, decimals and floats in any order, rounded once, when it is shown.

    A retracted number leaves no trace. Of whole numbers the sum is an ``int``, with decimals a ``Decimal`` with as many
    digits behind the point as the longest of them, and with floats the ``float`` nearest to the
    exact sum. Infinities, NaN and sums beyond the range of floats follow IEEE 754 and can be retracted. A pane shows
    null in their place, and the nearest float for whole numbers beyond 64 bits, because JSON has no such numbers.

    Example:
        >>> prices = Sum("price")
        >>> accumulator = prices.add_all(0, [{"price": 0.1}, {"price": 1e17}])
        >>> prices.extract(prices.uncombine(accumulator, {"price": 1e17}))
        0.1
    """

    of: ValueExtractor = None

    def create(self) -> Total:
        return 0

    def add_all(self, accumulator: Total, values: Iterable[Any]) -> Total:
        return with_numbers(accumulator, [extract(self.of, value) for value in values])

    def merge(self, accumulators: Sequence[Total]) -> Total:
        return merged(accumulators)

    def extract(self, accumulator: Total) -> int | float | Decimal:
        return number_of(accumulator)

    def uncombine(self, accumulator: Total, value: Any) -> Total:
        return without(accumulator, extract(self.of, value))


@dataclass(frozen=True)
class Mean(OfValue):
    """Arithmetic mean in any order of elements; ``None`` without elements.

    It is the float nearest to the exact one; of decimals a ``Decimal`` with four more digits behind the point.
    """

    of: ValueExtractor = None

    def create(self) -> list[Any]:
        return [0, 0]

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        numbers = [extract(self.of, value) for value in values]
        return [with_numbers(accumulator[0], numbers), accumulator[1] + len(numbers)]

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return [merged([total for total, _ in accumulators]), sum(count for _, count in accumulators)]

    def extract(self, accumulator: list[Any]) -> float | Decimal | None:
        total, count = accumulator
        return quotient(total, count) if count else None

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        return [without(accumulator[0], extract(self.of, value)), accumulator[1] - 1]


def without_element(elements: list[Any], value: Any) -> tuple[list[Any], bool]:
    """Return the elements without the first that equals ``value``, and True if it was among them."""
    if value not in elements:
        return elements, False
    rest = list(elements)
    rest.remove(value)
    return rest, True


class _OfList(OfValue):
    """A combine function whose accumulator is a list of elements."""

    def create(self) -> list[Any]:
        return []

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return [value for accumulator in accumulators for value in accumulator]

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        rest, is_held = self.uncombine_if_held(accumulator, value)
        if not is_held:
            raise InvalidError("a retraction matches no element", value=extract(self.of, value))
        return rest

    def uncombine_if_held(self, accumulator: list[Any], value: Any) -> tuple[list[Any], bool]:
        if not self.can_uncombine:
            raise InvalidError("retractions need a combiner with retractable=True", combiner=self)
        return without_element(accumulator, extract(self.of, value))


@dataclass(frozen=True)
class ToList(_OfList):
    """All elements, in order of arrival."""

    of: ValueExtractor = None

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        accumulator.append(extract(self.of, value))
        return accumulator

    def extract(self, accumulator: list[Any]) -> Any:
        return list(accumulator)


@dataclass(frozen=True)
class TopN(_OfList):
    """The ``count`` greatest elements, greatest first; null and NaN, which have no place in an order, are left out.

    Args:
        count: number of elements to emit, at least 1.
        smallest: emit the smallest instead, smallest first.
        retractable: keep all elements, so that they can be retracted; memory then grows with them.

    Example:
        >>> TopN(2).add_all([], [3, 1, 2])
        [3, 2]
    """

    count: int
    of: ValueExtractor = None
    smallest: bool = False
    retractable: bool = False

    def __post_init__(self) -> None:
        check_extractor(self.of)
        check_count("the count of a top list", self.count)
        check_flags(smallest=self.smallest, retractable=self.retractable)

    @property
    def can_uncombine(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere
        return self.retractable

    def _kept(self, values: list[Any]) -> list[Any]:
        values.sort(reverse=not self.smallest)
        return values if self.retractable else values[: self.count]

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        elements = (extract(self.of, value) for value in values)
        return self._kept([*accumulator, *(element for element in elements if _has_order(element))])

    def uncombine_if_held(self, accumulator: list[Any], value: Any) -> tuple[list[Any], bool]:
        if self.can_uncombine and not _has_order(extract(self.of, value)):
            return accumulator, True
        return super().uncombine_if_held(accumulator, value)

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return self._kept(_OfList.merge(self, accumulators))

    def extract(self, accumulator: list[Any]) -> Any:
        return accumulator[: self.count]


def _has_order(element: Any) -> bool:
    # Only a NaN differs from itself, whether a float or a decimal.
    return element is not None and bool(element == element)  # noqa: PLR0124


@dataclass(frozen=True)
class Max(TopN):
    """The greatest element; ``None`` if there is none. `TopN` explains ``retractable``."""

    count: int = field(default=1, init=False, repr=False)

    def extract(self, accumulator: list[Any]) -> Any:
        return accumulator[0] if accumulator else None


@dataclass(frozen=True)
class Min(Max):
    """The smallest element; ``None`` if there is none. `TopN` explains ``retractable``."""

    smallest: bool = field(default=True, init=False, repr=False)


def canonical_text(of: ValueExtractor, value: Any) -> str:
    element = extract(of, value)
    # Only of JSON's own types, as it has always been stored; others would be taken for the text that they are written as.
    text = encode_value(element)
    return (
        orjson.dumps(element, option=orjson.OPT_SORT_KEYS).decode()
        if not text.startswith(TYPED_MARK)
        else text
    )


@dataclass(frozen=True)
class CountDistinct(OfValue):
    """Exact number of distinct values; memory grows with that number."""

    of: ValueExtractor = None

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        name = canonical_text(self.of, value)
        accumulator[name] = accumulator.get(name, 0) + 1
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, int]]) -> dict[str, int]:
        merged: dict[str, int] = {}
        for accumulator in accumulators:
            for name, count in accumulator.items():
                merged[name] = merged.get(name, 0) + count
        return merged

    def extract(self, accumulator: dict[str, int]) -> int:
        # Early retractions leave negative counts.
        return sum(count > 0 for count in accumulator.values())

    def uncombine(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        name = canonical_text(self.of, value)
        accumulator[name] = accumulator.get(name, 0) - 1
        if not accumulator[name]:
            del accumulator[name]
        return accumulator


@dataclass(frozen=True)
class Quantiles(ToList):
    """Exact quantiles ``at`` of numbers, each from 0 to 1, by nearest rank; memory grows with the elements."""

    at: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        check_extractor(self.of)
        check_quantiles(self.at)

    def extract(self, accumulator: list[Any]) -> list[Any] | None:
        if not accumulator:
            return None
        ranked, last = sorted(accumulator), len(accumulator) - 1
        return [ranked[min(max(math.ceil(quantile * len(ranked)) - 1, 0), last)] for quantile in self.at]


class LastN(CombineFn):
    """The last ``n`` elements (at least 1) in the order of arrival, combined; retractions are not supported.

    With a trigger that fires every so many elements it makes sliding windows by count: a pane of the last ``n``
    elements follows every ten with ``Repeatedly(AfterCount(10))``, accumulating. The elements are stored, and combined
    for each pane, by default into their list. Elements of merged windows count in the order of the windows.

    Example:
        >>> last = LastN(2)
        >>> last.extract(last.add_all(last.create(), [1, 2, 3]))
        [2, 3]
    """

    can_uncombine = False

    def __init__(self, n: int, combine: CombineFn | None = None) -> None:
        check_count("a number of elements", n)
        if combine is not None and not isinstance(combine, CombineFn):
            raise InvalidError("LastN takes an instance of a CombineFn", combine=combine)
        self.n = n
        self.combine: CombineFn = ToList() if combine is None else combine

    def create(self) -> list[Any]:
        return []

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        return self.add_all(accumulator, (value,))

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        accumulator.extend(values)
        del accumulator[: -self.n]
        return accumulator

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return [value for accumulator in accumulators for value in accumulator][-self.n :]

    def extract(self, accumulator: list[Any]) -> Any:
        return self.combine.extract(self.combine.add_all(self.combine.create(), accumulator))
