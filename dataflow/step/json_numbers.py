"""Numbers that JSON cannot say, in the values of panes.

A sum of floats may be infinite or NaN, as IEEE 754 has it, and one of whole numbers may have more than 64
bits. The pane is shown nevertheless: with null, and with the nearest float.
"""

from __future__ import annotations

import math
from typing import Any

from millpond.dataflow.combiners.exact_sum import JSON_MAX, JSON_MIN


def as_json_numbers(value: Any) -> Any:
    """The value, or the fields of the value, with null for infinities and NaN, and floats for greater whole numbers.

    Example:
        >>> as_json_numbers({"sum": 2**64, "mean": float("nan"), "count": 3})
        {'sum': 1.8446744073709552e+19, 'mean': None, 'count': 3}
    """
    if type(value) is dict:
        if all(map(_is_sayable, value.values())):
            return value
        return {name: _sayable(field) for name, field in value.items()}
    return value if _is_sayable(value) else _sayable(value)


def _is_sayable(value: Any) -> bool:
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    return kind is not int or JSON_MIN <= value <= JSON_MAX


def _sayable(value: Any) -> Any:
    if _is_sayable(value):
        return value
    try:
        nearest = float(value)
    except OverflowError:
        return None
    return nearest if math.isfinite(nearest) else None
