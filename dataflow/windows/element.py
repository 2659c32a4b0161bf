"""Elements: the part of a record that window functions, triggers and combiners see."""

from __future__ import annotations

from typing import Any, NamedTuple


class Element(NamedTuple):
    """One value to be windowed.

    Attributes:
        value: the value; for a record from an earlier windowed step, the one inside the envelope.
        at: its event time, in microseconds since 1970 UTC.
        key: the key it is grouped by.
        is_retraction: whether it retracts an earlier value, which combiners then uncombine.
    """

    value: Any
    at: int
    key: str
    is_retraction: bool = False
