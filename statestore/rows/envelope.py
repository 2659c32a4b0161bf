"""Envelopes: how a windowed step's panes travel, and what only looks like one.

A pane is a JSON object with four fields, ``value``, ``window``, ``at`` and ``pane``, the last of which has nine of
its own (`millpond.dataflow.step.pane` defines what they mean). A row from outside may have the same fields. It is
a `PlainObject` then, in memory, and stays one as JSON text: that begins with a space, which no other value's text does.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.rows.codec import PlainObject
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

_FIELDS: Final = frozenset({"value", "window", "at", "pane"})
_FIELD_COUNT: Final = len(_FIELDS)
_PANE_FIELDS: Final = frozenset(
    {
        "index",
        "nonspeculative_index",
        "timing",
        "is_first",
        "is_last",
        "is_retraction",
        "watermark_percentile",
        "produced_at",
        "trigger",
    }
)
_BOUNDS: Final = 2
_ALL_TIME: Final = (TIME_MIN_US, TIME_MAX_US)
PLAIN_MARK: Final = " "
"""What the text of an object begins with that has the fields of an envelope and is none."""


def has_envelope_fields(value: object) -> bool:
    """Whether a value is an object with exactly the four fields of an envelope, whatever they hold."""
    # Called for each record: the length check settles most values.
    return isinstance(value, dict) and len(value) == _FIELD_COUNT and value.keys() == _FIELDS


def is_envelope(value: object) -> bool:
    """Whether a record's value is a windowed step's pane in its envelope."""
    if type(value) is not dict or len(value) != _FIELD_COUNT or value.keys() != _FIELDS:
        return False
    window, pane = value["window"], value["pane"]
    has_bounds = type(window) is list and len(window) == _BOUNDS
    return has_bounds and type(pane) is dict and pane.keys() == _PANE_FIELDS


def change_envelope(value: Any, at: int, *, is_retraction: bool) -> dict[str, Any]:
    """A change of a source's table as an envelope: an element of no window yet, or the retraction of one.

    Args:
        value: the row.
        at: its event time.
        is_retraction: whether the change takes it back.
    """
    pane = {
        "index": 0,
        "nonspeculative_index": 0,
        "timing": "on_time",
        "is_first": True,
        "is_last": False,
        "is_retraction": is_retraction,
        "watermark_percentile": None,
        "produced_at": 0,
        "trigger": "change",
    }
    return {"value": value, "window": list(_ALL_TIME), "at": at, "pane": pane}


def has_marks(texts: pa.StringArray) -> bool:
    """Whether any of these values is an object that only looks like an envelope."""
    return bool(pc.any(pc.starts_with(texts, PLAIN_MARK)).as_py())


def decode_value(text: str) -> Any:
    """A record's value of its JSON text, an object that only looks like an envelope as what it is.

    Raises:
        orjson.JSONDecodeError: the text is not JSON.
    """
    value = orjson.loads(text)
    return PlainObject(value) if text[:1] == PLAIN_MARK and type(value) is dict else value
