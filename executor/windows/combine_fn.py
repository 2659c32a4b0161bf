"""Combine functions: how the elements of a window are aggregated into one value, incrementally.

An accumulator is plain JSON data: it lives in the row's state. `CombineFn.merge` combines several
accumulators, so that windows can merge; `CombineFn.uncombine` removes an element, so that
retractions flow through aggregations (Beam's ``CombineFn``).

Several combine functions at once: one value with a field for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from millpond.statestore.errors import InvalidError

ValueExtractor: TypeAlias = str | Callable[[Any], Any] | None
"""Which part of an element is combined: a field name, a function of the value, or ``None`` for the whole value."""


def check_extractor(of: object) -> None:
    """Check that ``of`` is a `ValueExtractor`.

    Raises:
        InvalidError: it is neither a non-empty field name, nor callable, nor ``None``.
    """
    if not (of is None or callable(of) or (isinstance(of, str) and of)):
        raise InvalidError("a combiner takes a field, a function of the value or None", of=of)


def extract(of: ValueExtractor, value: Any) -> Any:
    """The part of ``value`` that ``of`` selects.

    Example:
        >>> extract("score", {"team": "red", "score": 7})
        7

    Raises:
        InvalidError: the value has no such field.
    """
    if of is None:
        return value
    if callable(of):
        return of(value)
    if isinstance(value, Mapping) and of in value:
        return value[of]
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

    def create(self) -> Any:
        """The accumulator of no elements."""
        raise NotImplementedError

    def add(self, accumulator: Any, value: Any) -> Any:
        """The accumulator with ``value`` added; may modify and return the given one."""
        raise NotImplementedError

    def add_all(self, accumulator: Any, values: Iterable[Any]) -> Any:
        """The accumulator with all ``values`` added; override it where a bundle can be added faster."""
        for value in values:
            accumulator = self.add(accumulator, value)
        return accumulator

    def merge(self, accumulators: Sequence[Any]) -> Any:
        """One accumulator from one or more; may modify and return one of the given ones."""
        raise NotImplementedError

    def extract(self, accumulator: Any) -> Any:
        """The combined value of an accumulator; by default the accumulator itself."""
        return accumulator

    def uncombine(self, accumulator: Any, value: Any) -> Any:  # noqa: ARG002 - for subclasses
        """The accumulator with one earlier ``value`` removed; may modify and return the given one.

        Raises:
            InvalidError: the function has no inverse, or the accumulator does not hold the value.
        """
        raise InvalidError("this combiner does not support retractions", combiner=type(self).__name__)

    def uncombine_if_held(self, accumulator: Any, value: Any) -> tuple[Any, bool]:
        """`uncombine`, where an earlier pane may have shown the value and cleared it since.

        Called in place of `uncombine` where panes clear the window's contents. Numbers go below zero then,
        so that panes still add up: that is the default. A combiner that refuses a value which it does not
        hold, such as a list, overrides this and leaves the accumulator as it is.

        Returns:
            The accumulator, and whether the retraction has changed anything.
        """
        return self.uncombine(accumulator, value), True


@dataclass(frozen=True)
class CombineFields(CombineFn):
    """Combines the elements in several ways; the combined value is an object with a field for each.

    A field that the pipeline did not have when a window began combines what has come since.

    Args:
        fields: the combine functions, by the names of their fields.

    Raises:
        InvalidError: no fields, a field's name that is not text or is empty, or what is no `CombineFn` instance.

    Example:
        >>> from millpond.executor.windows.combiners import Count, Sum
        >>> both = CombineFields({"total": Sum("amount"), "visits": Count()})
        >>> both.extract(both.add_all(both.create(), [{"amount": 3}, {"amount": 4}]))
        {'total': 7, 'visits': 2}
    """

    fields: Mapping[str, CombineFn]

    def __post_init__(self) -> None:
        """Validate the fields at construction."""
        if not self.fields:
            raise InvalidError("several combiners have at least one field")
        for name, combine in self.fields.items():
            if not isinstance(name, str) or not name:
                raise InvalidError("a combiner's field is named by text", field=name)
            if not isinstance(combine, CombineFn):
                raise InvalidError("a field takes an instance of a CombineFn", field=name, combine=combine)

    @property
    def can_uncombine(self) -> bool:  # type: ignore[override]  # a constant of the class elsewhere
        """Whether retractions are supported: by all of them."""
        return all(combine.can_uncombine for combine in self.fields.values())

    def create(self) -> dict[str, Any]:
        """The accumulators of no elements, by field."""
        return {name: combine.create() for name, combine in self.fields.items()}

    def add(self, accumulator: dict[str, Any], value: Any) -> dict[str, Any]:
        """Add the element to each accumulator."""
        return {
            name: combine.add(_of(accumulator, name, combine), value) for name, combine in self.fields.items()
        }

    def add_all(self, accumulator: dict[str, Any], values: Iterable[Any]) -> dict[str, Any]:
        """Add a bundle of elements to each accumulator, as fast as each combiner can."""
        elements = list(values)
        return {
            name: combine.add_all(_of(accumulator, name, combine), elements)
            for name, combine in self.fields.items()
        }

    def merge(self, accumulators: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the accumulators field by field."""
        return {
            name: combine.merge([_of(accumulator, name, combine) for accumulator in accumulators])
            for name, combine in self.fields.items()
        }

    def extract(self, accumulator: dict[str, Any]) -> dict[str, Any]:
        """The combined values, by field."""
        return {
            name: combine.extract(_of(accumulator, name, combine)) for name, combine in self.fields.items()
        }

    def uncombine(self, accumulator: dict[str, Any], value: Any) -> dict[str, Any]:
        """Remove the element from each accumulator.

        Raises:
            InvalidError: one of the combiners has no inverse, or does not hold the element.
        """
        return {
            name: combine.uncombine(_of(accumulator, name, combine), value)
            for name, combine in self.fields.items()
        }

    def uncombine_if_held(self, accumulator: dict[str, Any], value: Any) -> tuple[dict[str, Any], bool]:
        """Remove the element from each accumulator that holds it."""
        changed = {
            name: combine.uncombine_if_held(_of(accumulator, name, combine), value)
            for name, combine in self.fields.items()
        }
        rest = {name: part for name, (part, _) in changed.items()}
        return rest, any(has_effect for _, has_effect in changed.values())


def _of(accumulator: Mapping[str, Any], name: str, combine: CombineFn) -> Any:
    return accumulator[name] if name in accumulator else combine.create()
