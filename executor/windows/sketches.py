"""Combine functions that estimate distinct counts and quantiles in bounded memory.

They are HyperLogLog and t-digest sketches of Apache DataSketches, stored in the row's state as
Base64 text. Sketches merge, so windows can; they do not support retractions.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from datasketches import hll_sketch, hll_union, tdigest_double

from millpond.executor.windows.combine_fn import CombineFn, ValueExtractor, check_extractor, extract
from millpond.statestore.errors import InvalidError

_COMPRESSION: Final = 200


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@dataclass(frozen=True)
class ApproximateCountDistinct(CombineFn):
    """Estimated number of distinct values.

    Args:
        of: which part of an element is counted; the whole value by default.
        precision: base-2 logarithm of the sketch's bucket count, from 4 to 21. The relative
            standard error is 1.04 divided by the square root of the bucket count: 1.6 % at 12,
            in 2 KiB.

    Raises:
        InvalidError: a precision out of bounds.
    """

    can_uncombine = False

    of: ValueExtractor = None
    precision: int = 12

    def __post_init__(self) -> None:
        """Validate the arguments at construction."""
        check_extractor(self.of)
        if not 4 <= self.precision <= 21:
            raise InvalidError("the precision of a sketch lies between 4 and 21", precision=self.precision)

    def create(self) -> str:
        """An empty sketch."""
        return _text(hll_sketch(self.precision).serialize_compact())

    def add(self, accumulator: str, value: Any) -> str:
        """Update the sketch with the value."""
        return self.add_all(accumulator, (value,))

    def add_all(self, accumulator: str, values: Iterable[Any]) -> str:
        """Update the sketch with all values; it is deserialized only once."""
        sketch = hll_sketch.deserialize(base64.b64decode(accumulator))
        for value in values:
            sketch.update(orjson.dumps(extract(self.of, value), option=orjson.OPT_SORT_KEYS).decode())
        return _text(sketch.serialize_compact())

    def merge(self, accumulators: Sequence[str]) -> str:
        """The union of the sketches."""
        union = hll_union(self.precision)
        for accumulator in accumulators:
            union.update(hll_sketch.deserialize(base64.b64decode(accumulator)))
        return _text(union.get_result().serialize_compact())

    def extract(self, accumulator: str) -> int:
        """The estimate, rounded to a whole number."""
        estimate = hll_sketch.deserialize(base64.b64decode(accumulator)).get_estimate()
        return int(estimate + 0.5)


@dataclass(frozen=True)
class ApproximateQuantiles(CombineFn):
    """Estimated quantiles of numbers, most accurate at both ends.

    Args:
        of: which part of an element is ranked; the whole value by default.
        at: the quantiles to estimate, each from 0 to 1.

    Raises:
        InvalidError: a quantile out of bounds.
    """

    can_uncombine = False

    of: ValueExtractor = None
    at: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        """Validate the arguments at construction."""
        check_extractor(self.of)
        for quantile in self.at:
            if not 0 <= quantile <= 1:
                raise InvalidError("a quantile lies between 0 and 1", quantile=quantile)

    def create(self) -> str:
        """An empty sketch."""
        return _text(tdigest_double(_COMPRESSION).serialize())

    def add(self, accumulator: str, value: Any) -> str:
        """Update the sketch with the number."""
        return self.add_all(accumulator, (value,))

    def add_all(self, accumulator: str, values: Iterable[Any]) -> str:
        """Update the sketch with all numbers; it is deserialized only once."""
        sketch = tdigest_double.deserialize(base64.b64decode(accumulator))
        for value in values:
            sketch.update(float(extract(self.of, value)))
        return _text(sketch.serialize())

    def merge(self, accumulators: Sequence[str]) -> str:
        """One sketch of all numbers."""
        merged = tdigest_double(_COMPRESSION)
        for accumulator in accumulators:
            merged.merge(tdigest_double.deserialize(base64.b64decode(accumulator)))
        return _text(merged.serialize())

    def extract(self, accumulator: str) -> list[float] | None:
        """One estimate per quantile; ``None`` if there are no elements."""
        sketch = tdigest_double.deserialize(base64.b64decode(accumulator))
        return None if sketch.is_empty() else [float(sketch.get_quantile(quantile)) for quantile in self.at]
