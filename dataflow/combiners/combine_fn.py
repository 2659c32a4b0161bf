"""
Combine functions: how the elements of a window become one value, bit by bit.

An accumulator is plain data that JSON can carry: it lives in the row's state. `CombineFn.merge`
makes one of several, so that windows may merge and partial sums may meet; `CombineFn.uncombine`
takes an element back out, so that retractions flow through aggregations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from millpond.statestore.errors import InvalidError

__all__ = ["CombineFn", "ValueExtractor", "check_extractor", "extract"]

ValueExtractor: TypeAlias = str | Callable[[Any], Any] | None
"""What of an element is combined: a field, what a function makes of it, or (``None``) all of it."""


def check_extractor(of: object) -> None:
    """
    Refuse what cannot be a `ValueExtractor`.

    Raises:
        InvalidError: it is neither a field's name, nor callable, nor ``None``.
    """
    if not (of is None or callable(of) or (isinstance(of, str) and of)):
        raise InvalidError("a combiner takes a field, a function of the value or None", of=of)


def extract(of: ValueExtractor, value: Any) -> Any:
    """
    What of ``value`` is combined.

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
    """
    Base class of combine functions; what they keep between elements is in the accumulator alone.
    """

    can_uncombine: bool = True
    """Whether `uncombine` works."""

    def create(self) -> Any:
        """
        The accumulator of no elements.
        """
        raise NotImplementedError

    def add(self, accumulator: Any, value: Any) -> Any:
        """
        The accumulator with one element more; it may be the one that was given, changed.
        """
        raise NotImplementedError

    def add_all(self, accumulator: Any, values: Iterable[Any]) -> Any:
        """
        The accumulator with a bundle of elements more; worth overriding where one at a time is slow.
        """
        for value in values:
            accumulator = self.add(accumulator, value)
        return accumulator

    def merge(self, accumulators: Sequence[Any]) -> Any:
        """
        One accumulator from one or more.
        """
        raise NotImplementedError

    def extract(self, accumulator: Any) -> Any:
        """
        The combined value.
        """
        return accumulator

    def uncombine(self, accumulator: Any, value: Any) -> Any:  # noqa: ARG002 - a hook
        """
        The accumulator with one element less.

        Raises:
            InvalidError: the function has no inverse.
        """
        raise InvalidError("this combiner cannot take an element back", combiner=type(self).__name__)
