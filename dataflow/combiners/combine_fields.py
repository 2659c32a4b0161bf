"""Several combine functions at once: one value with a field for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.dataflow.combiners.combine_fn import CombineFn
from millpond.statestore.errors import InvalidError


@dataclass(frozen=True)
class CombineFields(CombineFn):
    """Combines the elements in several ways; the combined value is an object with a field for each.

    A field that the pipeline did not have when a window began combines what has come since.

    Args:
        fields: the combine functions, by the names of their fields.

    Raises:
        InvalidError: no fields, a field's name that is not text or is empty, or what is no `CombineFn` instance.

    Example:
        >>> from millpond.dataflow.combiners.combiners import Count, Sum
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
