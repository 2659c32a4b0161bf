"""Combine functions: the incremental aggregation of a window's elements into one value (Beam's ``CombineFn``).

An accumulator is plain JSON data: it lies in the row's state. `CombineFn.merge` joins accumulators, so
windows can merge. `CombineFn.uncombine` removes an element, so retractions pass through aggregations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from millpond.statestore.errors import InvalidError

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
        """Retract a value that an earlier pane may have shown and cleared since; return True if that changed anything.

        Called in place of `uncombine` where panes clear the window's contents. By default numbers go below zero,
        so that panes still add up. A list, which refuses a value that it does not hold, stays unchanged instead.
        """
        return self.uncombine(accumulator, value), True


@dataclass(frozen=True)
class CombineFields(CombineFn):
    """Several combine functions at once; the combined value is an object with a field for each.

    A field added to the pipeline after a window began combines the elements since then.

    Example:
        >>> from millpond.executor.windows.combiners import Count, Sum
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
