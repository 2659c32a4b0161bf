"""
Elements: what a window function and a trigger see of a record.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Element"]


class Element(NamedTuple):
    """
    One value on its way into windows.

    Attributes:
        value: the value itself, without the envelope of an earlier windowed step.
        at: its event time in microseconds.
        key: the key that it is grouped by.
        is_retraction: it takes back a value that came before; aggregates are to uncombine it.
    """

    value: Any
    at: int
    key: str
    is_retraction: bool = False
