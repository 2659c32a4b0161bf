"""Combine functions: the incremental aggregation of a window's elements into one value (Beam's ``CombineFn``).

An accumulator is plain JSON data: it lies in the row's state. `CombineFn.merge` joins accumulators, so
windows can merge. `CombineFn.uncombine` removes an element, so retractions pass through aggregations. Counts,
sums and lists support retractions. `Min`, `Max`, `TopN`, `ArgMax`, `ArgMin` and `Last` keep only some elements, unless
``retractable`` is set; then they keep all.

Nulls (None, and the missing values of NumPy and Pandas) are skipped, as in SQL; only `Count` of rows, `ToList` and
`LastN` have them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from operator import itemgetter
from typing import Any, ClassVar, Final, TypeAlias

from millpond.executor.computation.values import no_such_field
from millpond.executor.pipeline.checks import check_overrides
from millpond.executor.windows.exact_sum import (
    NOTHING,
    Total,
    deviation,
    merged,
    merged_squares,
    number_of,
    quotient,
    with_numbers,
    with_squares,
    without,
)
from millpond.statestore.arguments import check_count, check_flags, check_number
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import OF_PYTHON, as_python, decode_value, encode_value

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
    raise no_such_field(of, value)


def present(of: ValueExtractor, values: Iterable[Any]) -> list[Any]:
    """Return what is combined of the values, as Python's, without nulls."""
    return [
        part
        for value in values
        if type(part := extract(of, value)) in OF_PYTHON or (part := as_python(part)) is not None
    ]


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
class Count(OfValue):
    """Number of elements; with ``of`` the number of those in which it is not null."""

    of: ValueExtractor = None

    def _number(self, values: Iterable[Any]) -> int:
        return sum(1 for _ in values) if self.of is None else len(present(self.of, values))

    def create(self) -> int:
        return 0

    def add_all(self, accumulator: int, values: Iterable[Any]) -> int:
        return accumulator + self._number(values)

    def merge(self, accumulators: Sequence[int]) -> int:
        return sum(accumulators)

    def uncombine(self, accumulator: int, value: Any) -> int:
        return accumulator - self._number((value,))


@dataclass(frozen=True)
class Sum(OfValue):
    """Exact sum of whole numbers, decimals and floats in any order, rounded once, when it is shown; or of durations.

    Nulls are skipped.

    A retracted number leaves no trace. Of whole numbers the sum is an ``int`` of any size, with decimals a ``Decimal``
    with as many digits behind the point as the longest of them, and with floats the ``float`` nearest to the
    exact sum. Infinities, NaN and sums beyond the range of floats follow IEEE 754 and can be retracted. The sum of
    durations is a ``timedelta``, of nulls alone null, and of no elements 0.

    Example:
        >>> prices = Sum("price")
        >>> accumulator = prices.add_all(0, [{"price": 0.1}, {"price": 1e17}])
        >>> prices.extract(prices.uncombine(accumulator, {"price": 1e17}))
        0.1
    """

    of: ValueExtractor = None

    def create(self) -> Total:
        return NOTHING

    def add_all(self, accumulator: Total, values: Iterable[Any]) -> Total:
        return with_numbers(accumulator, [extract(self.of, value) for value in values])

    def merge(self, accumulators: Sequence[Total]) -> Total:
        return merged(accumulators)

    def extract(self, accumulator: Total) -> int | float | Decimal | timedelta | None:
        return number_of(accumulator)

    def uncombine(self, accumulator: Total, value: Any) -> Total:
        return without(accumulator, [extract(self.of, value)])


@dataclass(frozen=True)
class Mean(OfValue):
    """Arithmetic mean in any order of elements that are not null; ``None`` without any.

    It is the float nearest to the exact one; of decimals a ``Decimal`` with four more digits behind the point; of
    durations the nearest ``timedelta``.
    """

    of: ValueExtractor = None

    def create(self) -> list[Any]:
        return [0, 0]

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        numbers = present(self.of, values)
        return [with_numbers(accumulator[0], numbers), accumulator[1] + len(numbers)]

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return [merged([total for total, _ in accumulators]), sum(count for _, count in accumulators)]

    def extract(self, accumulator: list[Any]) -> float | Decimal | timedelta | None:
        total, count = accumulator
        return quotient(total, count) if count else None

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        numbers = present(self.of, (value,))
        return [without(accumulator[0], numbers), accumulator[1] - len(numbers)]


@dataclass(frozen=True)
class StdDev(OfValue):
    """Standard deviation of numbers in any order of elements: the float nearest to the exact one.

    It is that of a sample, as SQL's ``STDDEV``, and ``None`` of fewer than two numbers; with ``population`` that of a
    population, as ``STDDEV_POP``, and 0.0 of one number. With an infinity or NaN it is NaN.

    Example:
        >>> spread = StdDev("price")
        >>> spread.extract(spread.add_all(spread.create(), [{"price": 1}, {"price": 3}, {"price": None}]))
        1.4142135623730951
    """

    of: ValueExtractor = None
    population: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(population=self.population)

    def create(self) -> list[Any]:
        return [0, 0, "0/1"]

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        numbers, (total, count, squares) = present(self.of, values), accumulator
        return [with_numbers(total, numbers), count + len(numbers), with_squares(squares, numbers, 1)]

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        totals, counts, squares = zip(*accumulators, strict=True)
        return [merged(totals), sum(counts), merged_squares(squares)]

    def extract(self, accumulator: list[Any]) -> float | None:
        total, count, squares = accumulator
        divisor = count if self.population else count - 1
        return deviation(total, squares, count, divisor) if divisor > 0 else None

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        numbers, (total, count, squares) = present(self.of, (value,)), accumulator
        return [without(total, numbers), count - len(numbers), with_squares(squares, numbers, -1)]


_FREQUENT: Final = frozenset({str, int, float})


def without_element(elements: list[Any], value: Any) -> tuple[list[Any], bool]:
    """Return the elements without the first that is or equals ``value``, and True if it was among them."""
    place = _place(elements, value)
    return (elements, False) if place is None else ([*elements[:place], *elements[place + 1 :]], True)


def _place(elements: list[Any], value: Any) -> int | None:
    """Return the place of the first element of the same value and type, or else of the first that equals ``value``."""
    if type(value) in _FREQUENT and value in elements:
        first = elements.index(value)
        # 0.0 equals -0.0, which has another text.
        if value and type(elements[first]) is type(value):
            return first
    text = encode_value(value)
    # Elements of this turn may still be tuples or NumPy's, as the value may be.
    value = decode_value(text)
    if value in elements:
        first = elements.index(value)
        if encode_value(elements[first]) == text:
            return first
    elif not isinstance(value, list | dict) and has_order(value):
        return None
    # Python's == takes True for 1, a NaN for no NaN, and a tuple for no list.
    equal: int | None = None
    wanted = canonical_text(value)
    for at, element in enumerate(elements):
        if encode_value(element) == text:
            return at
        if equal is None and canonical_text(element) == wanted:
            equal = at
    return equal


class _OfList(OfValue):
    """A combine function whose accumulator is a list of elements."""

    def _element(self, value: Any) -> Any:
        return extract(self.of, value)

    def create(self) -> list[Any]:
        return []

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return [value for accumulator in accumulators for value in accumulator]

    def uncombine(self, accumulator: list[Any], value: Any) -> list[Any]:
        rest, is_held = self.uncombine_if_held(accumulator, value)
        if not is_held:
            raise InvalidError("a retraction matches no element", value=self._element(value))
        return rest

    def uncombine_if_held(self, accumulator: list[Any], value: Any) -> tuple[list[Any], bool]:
        if not self.can_uncombine:
            raise InvalidError("retractions need a combiner with retractable=True", combiner=self)
        return without_element(accumulator, self._element(value))


@dataclass(frozen=True)
class ToList(_OfList):
    """All elements, in order of arrival, nulls among them."""

    of: ValueExtractor = None

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        accumulator.append(extract(self.of, value))
        return accumulator

    def extract(self, accumulator: list[Any]) -> Any:
        return list(accumulator)


class _OfSome(_OfList):
    """A combine function that keeps only some of its usable elements, unless ``retractable`` is set; then all of them."""

    retractable: bool

    @property
    def can_uncombine(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere
        return self.retractable

    def _usable(self, values: Iterable[Any]) -> list[Any]:
        return present(self.of, values)

    def _kept(self, elements: list[Any]) -> list[Any]:
        raise NotImplementedError

    def add_all(self, accumulator: list[Any], values: Iterable[Any]) -> list[Any]:
        return self._kept([*accumulator, *self._usable(values)])

    def merge(self, accumulators: Sequence[list[Any]]) -> list[Any]:
        return self._kept(super().merge(accumulators))

    def uncombine_if_held(self, accumulator: list[Any], value: Any) -> tuple[list[Any], bool]:
        if self.can_uncombine and not self._usable((value,)):
            return accumulator, True
        return super().uncombine_if_held(accumulator, value)


@dataclass(frozen=True)
class Last(_OfSome):
    """The last element that is not null, in order of arrival; ``None`` if there is none.

    Elements of merged windows count in the order of the windows, as in `LastN`. For the last by a time in the elements,
    whatever the order of arrival, take ``ArgMax("price", by="time")``.

    Args:
        retractable: keep all elements, so that they can be retracted; memory then grows with them.

    Example:
        >>> Last("price").add_all([], [{"price": 3}, {"price": 5}, {"price": None}])
        [5]
    """

    of: ValueExtractor = None
    retractable: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(retractable=self.retractable)

    def _kept(self, elements: list[Any]) -> list[Any]:
        return elements if self.retractable else elements[-1:]

    def extract(self, accumulator: list[Any]) -> Any:
        return accumulator[-1] if accumulator else None


@dataclass(frozen=True)
class TopN(_OfSome):
    """The ``count`` greatest elements, greatest first.

    Elements are numbers, text, bytes, booleans, times, durations or lists, of one such kind. Null, NaN and lists with a
    null or NaN in them are left out.

    Args:
        count: number of elements to emit, at least 1.
        smallest: emit the smallest instead, smallest first.
        retractable: keep all elements, so that they can be retracted; memory then grows with them.
        nan_is_greatest: take NaN for the greatest number, as Spark does, instead of leaving it out.

    Example:
        >>> TopN(2).add_all([], [3, 1, 2])
        [3, 2]
    """

    count: int
    of: ValueExtractor = None
    smallest: bool = False
    retractable: bool = False
    nan_is_greatest: bool = False

    def __post_init__(self) -> None:
        check_extractor(self.of)
        check_count("the count of a top list", self.count)
        check_flags(
            smallest=self.smallest, retractable=self.retractable, nan_is_greatest=self.nan_is_greatest
        )

    def _usable(self, values: Iterable[Any]) -> list[Any]:
        return [
            one
            for one in present(self.of, values)
            # Asked here because a call would take as long again.
            if (type(one) in _FREQUENT and one == one)  # noqa: PLR0124 - only a NaN differs from itself
            or has_order(one, nan_is_greatest=self.nan_is_greatest)
        ]

    def _kept(self, elements: list[Any]) -> list[Any]:
        ranked = in_order(elements, reverse=not self.smallest, nan_is_greatest=self.nan_is_greatest)
        return ranked if self.retractable else ranked[: self.count]

    def extract(self, accumulator: list[Any]) -> Any:
        return accumulator[: self.count]


_ORDERED: Final = OF_PYTHON - {list, tuple, dict}


def has_order(element: Any, *, nan_is_greatest: bool = False) -> bool:
    """Return False for null, NaN unless it is the greatest, and lists with such a part; refuse types without order."""
    # Only a NaN differs from itself.
    if type(element) in _FREQUENT:
        return nan_is_greatest or bool(element == element)  # noqa: PLR0124
    element = as_python(element)
    if isinstance(element, list | tuple):
        return all(has_order(part, nan_is_greatest=nan_is_greatest) for part in element)
    if element is None:
        return False
    if type(element) not in _ORDERED:
        raise InvalidError(
            "elements to put into order must be numbers, text, bytes, times, durations, UUIDs, or lists of these",
            type=type(element).__qualname__,
        )
    return nan_is_greatest or not _is_nan(element)


def _is_nan(element: Any) -> bool:
    return element.is_nan() if isinstance(element, Decimal) else bool(element != element)  # noqa: PLR0124


def _with_nan_last(element: Any) -> Any:
    if isinstance(element, list | tuple):
        return [*map(_with_nan_last, element)]
    is_nan = _is_nan(element)
    return is_nan, 0 if is_nan else element


def in_order(elements: list[Any], *, reverse: bool = False, nan_is_greatest: bool = False) -> list[Any]:
    try:
        return sorted(elements, key=_with_nan_last if nan_is_greatest else None, reverse=reverse)
    except TypeError as cause:
        types = sorted({type(element).__name__ for element in elements})
        raise InvalidError("elements of these types have no order among each other", types=types) from cause


def _with_order(elements: list[Any], *, nan_is_greatest: bool) -> list[Any]:
    try:
        total = sum(elements)
        has_all = total == total  # noqa: PLR0124 - only a NaN differs from itself, and a NaN makes the sum one
    except (TypeError, ArithmeticError):
        has_all = False
    # One sum is a tenth of the time of one look at each number.
    if has_all:
        return elements
    return [one for one in map(as_python, elements) if has_order(one, nan_is_greatest=nan_is_greatest)]


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


@dataclass(frozen=True)
class ArgMax(_OfSome):
    """What ``of`` takes of the element in which ``by`` is greatest, maybe null; ``None`` if there is none.

    Elements in which ``by`` is null or NaN are left out. If it is greatest in several elements, the least ``of`` counts:
    numbers by their size, other values by their text. So the order of arrival does not matter. `TopN` explains
    ``retractable`` and ``nan_is_greatest``.

    Example:
        >>> best = ArgMax("item", by="price")
        >>> best.extract(best.add_all([], [{"item": "cup", "price": 3}, {"item": "pot", "price": 9}]))
        'pot'
    """

    of: ValueExtractor
    by: ValueExtractor
    retractable: bool = False
    nan_is_greatest: bool = False

    is_of_smallest: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_extractor(self.by)
        check_flags(retractable=self.retractable, nan_is_greatest=self.nan_is_greatest)

    def _element(self, value: Any) -> list[Any]:
        return [as_python(extract(self.by, value)), as_python(extract(self.of, value))]

    def _usable(self, values: Iterable[Any]) -> list[list[Any]]:
        elements = map(self._element, values)
        return [one for one in elements if has_order(one[0], nan_is_greatest=self.nan_is_greatest)]

    def _kept(self, elements: list[Any]) -> list[Any]:
        return elements if self.retractable or len(elements) < 2 else [self._best(elements)]

    def _best(self, elements: list[Any]) -> Any:
        places = [place for place, _ in elements]
        first, *_ = in_order(places, reverse=not self.is_of_smallest, nan_is_greatest=self.nan_is_greatest)
        place = _with_nan_last(first)
        return min((one for one in elements if _with_nan_last(one[0]) == place), key=_tie_breaker)

    def extract(self, accumulator: list[Any]) -> Any:
        return self._best(accumulator)[1] if accumulator else None


def _tie_breaker(element: list[Any]) -> tuple[Any, ...]:
    value = element[1]
    is_number = type(value) in {int, float, Decimal} and has_order(value)
    return not is_number, value if is_number else 0, encode_value(value)


@dataclass(frozen=True)
class ArgMin(ArgMax):
    """What ``of`` takes of the element in which ``by`` is smallest; see `ArgMax`."""

    is_of_smallest: ClassVar[bool] = True


_AS_THEY_ARE: Final = frozenset({str, int, bool, type(None)})
# `encode_value` takes no whole number of more digits, so no decimal beyond them equals one.
_DIGITS_MAX: Final = 4_300


def canonical_text(value: Any) -> str:
    """Return the text of a value; equal values share it, such as 1, 1.0 and ``Decimal(1)``, but not ``True``."""
    return encode_value(value if type(value) in _AS_THEY_ARE else _canonical(value))


def _canonical(value: Any) -> Any:
    value = as_python(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Decimal):
        return _canonical_decimal(value)
    if isinstance(value, datetime):
        return value if value.utcoffset() is None else _in_utc(value)
    if isinstance(value, list | tuple):
        # Tuples, because a key of a map may be one.
        return tuple(map(_canonical, value))
    if isinstance(value, Mapping):
        parts = ((_canonical(name), _canonical(part)) for name, part in value.items())
        return dict(sorted(parts, key=lambda part: repr(part[0])))
    return value


def _in_utc(value: datetime) -> datetime:
    try:
        return value.astimezone(UTC)
    except OverflowError:
        # Beyond the first or last day of UTC, so no instant of another zone is the same.
        return value


def _canonical_decimal(number: Decimal) -> int | float | Decimal:
    sign, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int):
        return math.nan if number.is_nan() else float(number)
    # The decimal expansion of a float that is no whole number ends in 5.
    if exponent < 0 and digits[-1] not in (0, 5):
        return number
    if number.adjusted() < _DIGITS_MAX and number == (whole := int(number)):
        return whole
    nearest = float(number)
    if math.isfinite(nearest) and number == Decimal(nearest):
        return nearest
    kept = max(place for place, digit in enumerate(digits, 1) if digit)
    return Decimal((sign, digits[:kept], exponent + len(digits) - kept))


_NULL: Final = "null"
_OF_TEXT: Final = frozenset('"')
_OF_NUMBERS: Final = frozenset("-0123456789")
# Texts that are canonical for sure: of text, whole numbers, fractions, and lone values of most other types.
_CANONICAL: Final = re.compile(
    r'"|(?:null|true|false|-?\d+|-?\d+\.\d*[1-9])\Z'
    r'|  \{"\$value":(?:"-?\d+\.\d*[1-46-9]","\$types":\{"":"decimal"'
    r'|"[\d-]+T[\d:.]+(?:\+00:00)?","\$types":\{"":"datetime"'
    r'|[^{]*\{"":"(?:bytes|date|time|timedelta_us|uuid)")\}\}\Z'
)


def _are_canonical(names: Collection[str]) -> bool:
    firsts = set(map(itemgetter(0), names))
    if firsts <= _OF_TEXT:
        return True
    if firsts <= _OF_NUMBERS:
        # One look at all of them is a fifth of the time of one match for each.
        lines = "\n".join((*names, ""))
        if ".0\n" not in lines and "e" not in lines:
            return True
    return all(map(_CANONICAL.match, names))


def _joined(counts: dict[str, int]) -> dict[str, int]:
    """Return the counts by canonical text: earlier versions counted 1 and 1.0 apart."""
    if _are_canonical(counts):
        return counts
    others = {name: canonical_text(decode_value(name)) for name in counts if not _CANONICAL.match(name)}
    joined: dict[str, int] = {}
    for name, count in counts.items():
        text = others.get(name, name)
        joined[text] = joined.get(text, 0) + count
    return joined


class _OfDistinct(OfValue):
    """A combine function whose accumulator counts elements by their text."""

    @staticmethod
    def _text(value: Any) -> str:
        raise NotImplementedError

    def create(self) -> dict[str, int]:
        return {}

    def add(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        name = self._text(extract(self.of, value))
        if name != _NULL:
            accumulator[name] = accumulator.get(name, 0) + 1
        return accumulator

    def merge(self, accumulators: Sequence[dict[str, int]]) -> dict[str, int]:
        merged: dict[str, int] = {}
        for accumulator in accumulators:
            for name, count in accumulator.items():
                merged[name] = merged.get(name, 0) + count
        return merged

    def uncombine(self, accumulator: dict[str, int], value: Any) -> dict[str, int]:
        name = self._text(extract(self.of, value))
        if name != _NULL:
            accumulator[name] = accumulator.get(name, 0) - 1
            if not accumulator[name]:
                del accumulator[name]
        return accumulator


@dataclass(frozen=True)
class CountDistinct(_OfDistinct):
    """Exact number of distinct values; memory grows with that number.

    Numbers that are equal are one, such as 1, 1.0 and ``Decimal("1.00")``, as are equal instants in two zones. ``True``
    is not 1.
    """

    of: ValueExtractor = None

    _text = staticmethod(canonical_text)

    def extract(self, accumulator: dict[str, int]) -> int:
        # Early retractions leave negative counts, and earlier versions counted nulls.
        return sum(count > 0 and name != _NULL for name, count in _joined(accumulator).items())


@dataclass(frozen=True)
class ToSet(_OfDistinct):
    """The distinct values as a list, least first; memory grows with their number.

    `CountDistinct` explains which values are one; it is shown in the shortest of the forms that it came in. Values that
    have no order among each other are in the order of their texts.

    Example:
        >>> kinds = ToSet()
        >>> kinds.extract(kinds.add_all({}, [3, 1, None, 3.0]))
        [1, 3]
    """

    of: ValueExtractor = None

    _text = staticmethod(encode_value)

    def extract(self, accumulator: dict[str, int]) -> list[Any]:
        counts: dict[str, int] = {}
        shown: dict[str, Any] = {}
        for text, count in sorted(accumulator.items(), key=lambda one: (len(one[0]), one[0])):
            value = decode_value(text)
            name = canonical_text(value)
            counts[name] = counts.get(name, 0) + count
            if count > 0:
                shown.setdefault(name, value)
        values = [value for name, value in shown.items() if counts[name] > 0]
        try:
            return in_order(values, nan_is_greatest=True)
        except InvalidError:
            return values


@dataclass(frozen=True)
class Quantiles(ToList):
    """Exact quantiles ``at`` of numbers, each from 0 to 1, by nearest rank; null and NaN are left out.

    Memory grows with the elements. Durations, times and text have quantiles, too. `TopN` explains ``nan_is_greatest``.
    """

    at: tuple[float, ...] = (0.5,)
    nan_is_greatest: bool = False

    def __post_init__(self) -> None:
        check_extractor(self.of)
        check_quantiles(self.at)
        check_flags(nan_is_greatest=self.nan_is_greatest)

    def add(self, accumulator: list[Any], value: Any) -> list[Any]:
        element = extract(self.of, value)
        before = next((one for one in reversed(accumulator) if one is not None), element)
        if type(element) is not type(before) or type(element) not in _FREQUENT:
            # Refused now, because it would be in the way of every later pane.
            in_order([one for one in map(as_python, (before, element)) if has_order(one)])
        accumulator.append(element)
        return accumulator

    def extract(self, accumulator: list[Any]) -> list[Any] | None:
        is_greatest = self.nan_is_greatest
        ranked = in_order(_with_order(accumulator, nan_is_greatest=is_greatest), nan_is_greatest=is_greatest)
        if not ranked:
            return None
        last = len(ranked) - 1
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
