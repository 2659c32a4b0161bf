"""Values as JSON text that SQL can read, with the types that JSON lacks.

A value of JSON's types is its plain JSON text. Any other value of the model (docs/design/024-types.md) is the JSON that
a reader expects: a time in ISO 8601, the digits of a decimal, bytes in base64. Its text begins with `TYPED_MARK`, and its
object ends with ``$types``: the type of each such part, under its JSON pointer (RFC 6901). A list or a lone value is
wrapped as ``$value`` for that.

    {"amount":"1.10","$types":{"/amount":"decimal"}}

So ``state ->> 'amount'`` continues to work, and a decoded value equals the encoded one.
"""

from __future__ import annotations

import base64
import json
import marshal
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.durations import MICROSECOND
from millpond.statestore.errors import InvalidError


class PlainObject(dict[str, Any]):
    """An object of plain fields, which codecs encode as a ``dict`` and never decode into another type."""

    __slots__ = ()


# A pane travels as an envelope: a JSON object with four fields, the last of which has nine more
# (`millpond.executor.windows.pane` defines them). An outside row with the same fields is a `PlainObject` in memory, and
# its JSON text begins with this mark, which no other value's text does.
PLAIN_MARK: Final = " "
TYPED_MARK: Final = "  "
"""The beginning of a text with types; a text without any begins with no blank, or with `PLAIN_MARK`."""

# A text's first characters, as text and as bytes: `decode_value` runs for each state and value.
_PLAIN_MARKS: Final = (PLAIN_MARK, PLAIN_MARK.encode())
_TYPED_MARKS: Final = (TYPED_MARK, TYPED_MARK.encode())

_TYPES: Final = "$types"
_VALUE: Final = "$value"
_WHOLE: Final = ""
_PLAIN: Final = "plain"
_OF_JSON: Final = frozenset({str, int, float, bool, type(None)})
# From version 3 on marshal looks for parts that are the same object, which takes as long again.
_MARSHAL_WITHOUT_REFERENCES: Final = 2
_DEPTH_MAX: Final = 250
_PARTS_MAX: Final = 1 << 22
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1
# Otherwise orjson silently converts these into strings, dicts and bare base types.
_OPTIONS: Final = (
    orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS
)


@dataclass(frozen=True, slots=True)
class TypedText:
    """A value as JSON text, and the type of each part whose type JSON lacks, by its pointer; ``""`` is the whole value."""

    text: str
    types: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shown:
    """A value in place of an object that is in no model: people can read it, and nothing restores the object."""

    value: Any


Substitute: TypeAlias = Callable[[str, Any], Any]
"""Takes the pointer and the object that is no value; returns another one in its place, or raises."""


def encode_value(value: Any) -> str:
    """Return a value as text, or raise `InvalidError` for one that is not in the model, with the path of the part.

    Example:
        >>> encode_value({"n": 3}), encode_value([Decimal("1.10")])
        ('{"n":3}', '  {"$value":["1.10"],"$types":{"/0":"decimal"}}')
    """
    if type(value) is int and _INT_MIN <= value <= _INT_MAX:
        return str(value)
    text = _flat_text(value) if type(value) is dict else _plain_text(value)
    if text is not None:
        return text
    describer = _Describer(refused)
    plain, types = describer.of(value, _WHOLE), describer.types
    if not types:
        return orjson.dumps(plain).decode()
    if type(plain) is not dict or _TYPES in plain or _VALUE in plain or _WHOLE in types:
        plain = {_VALUE: plain}
    plain[_TYPES] = types
    return TYPED_MARK + orjson.dumps(plain).decode()


def decode_value(text: str | bytes) -> Any:
    """Return the value of a text; an object that only looks like an envelope becomes a `PlainObject`."""
    value = orjson.loads(text)
    if text[:1] not in _PLAIN_MARKS:
        return value
    if text[:2] in _TYPED_MARKS:
        return typed_object(value)
    return PlainObject(value) if type(value) is dict else value


def has_marks(texts: pa.StringArray) -> bool:
    """Return True if a text begins with a mark: without one orjson alone decodes them all."""
    return bool(pc.any(pc.starts_with(texts, PLAIN_MARK)).as_py())


def untyped_object(parsed: dict[str, Any]) -> Any:
    """Return a parsed text with types as JSON alone, without them."""
    return parsed.get(_VALUE, {name: part for name, part in parsed.items() if name != _TYPES})


def typed_object(parsed: dict[str, Any]) -> Any:
    """Return the value of a parsed text with types."""
    types = parsed.pop(_TYPES)
    return typed_value(parsed.get(_VALUE, parsed), types)


def typed_text(value: Any, substitute: Substitute) -> TypedText:
    """Return a value as text without a mark; half a character, which has no UTF-8 form, is kept as JSON's escape."""
    text = _plain_text(value)
    if text is not None:
        return TypedText(text)
    describer = _Describer(substitute, takes_halves=True)
    plain = describer.of(value, _WHOLE)
    try:
        text = orjson.dumps(plain).decode()
    except TypeError:
        text = json.dumps(plain, separators=(",", ":"))
    return TypedText(text, describer.types)


def typed_value(plain: Any, types: Mapping[str, str]) -> Any:
    """Return the value of parsed JSON, with its types: the reverse of `typed_text`."""
    readers = _field_readers(tuple(types.items())) if type(plain) is dict else None
    if readers is not None:
        for name, read in readers:
            plain[name] = read(plain[name])
        return plain
    box = {_WHOLE: plain}
    # Innermost first, so that the pointers to outer parts stay valid.
    for pointer in sorted(types, key=_depth, reverse=True) if len(types) > 1 else types:
        *outer, last = pointer.split("/")
        holder: Any = box
        for name in outer:
            holder = holder[_step(holder, name)]
        step = _step(holder, last)
        holder[step] = _READ[types[pointer]](holder[step])
    return box[_WHOLE]


@lru_cache(maxsize=1024)
def _field_readers(types: tuple[tuple[str, str], ...]) -> tuple[tuple[str, Callable[[Any], Any]], ...] | None:
    """Return the reader of each field if all types stand in an object's own fields, as in most rows; else ``None``."""
    if not all(pointer.rfind("/") == 0 and "~" not in pointer for pointer, _ in types):
        return None
    return tuple((pointer[1:], _READ[word]) for pointer, word in types)


def part_name(pointer: str, whole: str = "value") -> str:
    """Return a JSON pointer as Python would write it.

    Example:
        >>> part_name("/items/3/price")
        'value.items[3].price'
    """
    steps = [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]
    return whole + "".join(f"[{step}]" if step.isdecimal() else f".{step}" for step in steps)


def _flat_text(value: dict[Any, Any]) -> str | None:
    """Return the text of an object; of one with types only if it has no nested parts, as most rows."""
    if _OF_JSON.issuperset(map(type, value.values())):
        return _plain_text(value, is_flat=True)
    if not _FLAT.issuperset(map(type, value.values())):
        return _plain_text(value)
    if value.keys() & _RESERVED:
        return None
    try:
        names = "".join(value)
        fields, types = _typed_fields(value)
        fields[_TYPES] = types
        return None if "/" in names or "~" in names else TYPED_MARK + orjson.dumps(fields).decode()
    except (TypeError, InvalidError):
        # A name that is no text, half a character, or a time of day that is refused.
        return None


def _typed_fields(value: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    fields, types = value.copy(), {}
    for name, part in value.items():
        kind = type(part)
        word = _WORDS.get(kind)
        if (
            word is None
            or (kind is int and _INT_MIN <= part <= _INT_MAX)
            or (kind is float and math.isfinite(part))
        ):
            continue
        types["/" + name] = word[0]
        # In orjson's own words a time takes a tenth of the time.
        if kind is not date and (kind is not datetime or not _has_same_text(part)):
            fields[name] = word[1](part)
    return fields, types


def _plain_text(value: Any, *, is_flat: bool = False) -> str | None:
    """Return the JSON text of a value of JSON's types, and ``None`` for any other; all fields of a flat one have them."""
    try:
        encoded = orjson.dumps(value, _as_dict, _OPTIONS)
    except TypeError:
        return None
    # orjson writes NaN and infinities as null, so search the value only if there is a null.
    if not (is_flat or _is_of_json(value)) or (b"null" in encoded and _has_non_finite(value)):
        return None
    return encoded.decode()


def _is_of_json(value: Any) -> bool:
    """Return False if orjson has made text or a number of an object: of a UUID or an enumeration's member."""
    if type(value) in _OF_JSON:
        return True
    try:
        # In C, and a sixth of a walk in Python. Of what orjson takes, marshal refuses all but JSON's own types.
        marshal.dumps(value, _MARSHAL_WITHOUT_REFERENCES)
    except ValueError:
        return _has_parts_of_json(value)
    return True


def _has_parts_of_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_has_parts_of_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_has_parts_of_json, value))
    return type(value) in _OF_JSON


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, PlainObject):
        return dict(value)
    raise TypeError


def _has_non_finite(value: object) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_non_finite, value.values()))
    return isinstance(value, list | tuple) and any(map(_has_non_finite, value))


class _Describer:
    """Makes JSON of values, and collects the types of their parts."""

    __slots__ = ("_left", "_substitute", "_takes_halves", "types")

    def __init__(self, substitute: Substitute, *, takes_halves: bool = False) -> None:
        self.types: dict[str, str] = {}
        self._substitute = substitute
        self._takes_halves = takes_halves
        self._left = _PARTS_MAX

    def of(self, value: Any, pointer: str) -> Any:
        kind = type(value)
        if kind is str:
            return value if self._takes_halves or has_utf8(value) else self._other(value, pointer)
        if kind in _ATOMS or (kind is float and math.isfinite(value)):
            return value
        if kind is int and _INT_MIN <= value <= _INT_MAX:
            return value
        word = _WORDS.get(kind)
        if word is not None:
            self.types[pointer] = word[0]
            try:
                return word[1](value)
            except InvalidError as error:
                raise _placed(error, pointer) from error
        self._left -= 1
        if self._left < 0 or pointer.count("/") > _DEPTH_MAX:
            raise InvalidError(
                "a value has too many parts, or contains itself", part=part_name(pointer)[:200]
            )
        if kind is list or kind is tuple:
            return [self.of(item, f"{pointer}/{index}") for index, item in enumerate(value)]
        if kind is dict:
            return self._of_dict(value, pointer)
        if kind is PlainObject:
            self.types[pointer] = _PLAIN
            return self._of_dict(value, pointer)
        return self._other(value, pointer)

    def _of_dict(self, value: dict[Any, Any], pointer: str) -> Any:
        if all(type(name) is str and has_utf8(name) for name in value):
            return {
                name: self.of(part, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")
                for name, part in value.items()
            }
        self.types[pointer] = "mapping"
        pairs = enumerate(value.items())
        return [
            [self.of(part, f"{pointer}/{row}/{at}") for at, part in enumerate(pair)] for row, pair in pairs
        ]

    def _other(self, value: Any, pointer: str) -> Any:
        try:
            known = as_python(value)
        except InvalidError as error:
            raise _placed(error, pointer) from error
        # NumPy has numbers without a counterpart in Python, which stay unchanged.
        if type(known) is not type(value):
            return self.of(known, pointer)
        known = self._substitute(pointer, value)
        if isinstance(known, Shown):
            plain = self.of(known.value, pointer)
            self.types[pointer] = "repr"
            return plain
        return self.of(known, pointer)


def _time_text(moment: time) -> str:
    if moment.tzinfo is not None and moment.utcoffset() is None:
        raise InvalidError(
            "a time of day cannot have a zone whose offset depends on the day: give an offset or a datetime",
            value=moment,
            zone=moment.tzinfo,
        )
    return moment.isoformat()


def _whole(number: int) -> int | str:
    return number if _INT_MIN <= number <= _INT_MAX else str(number)


_ATOMS: Final = frozenset({type(None), bool})
_WORDS: Final[Mapping[type, tuple[str, Callable[[Any], Any]]]] = {
    float: ("float", repr),
    int: ("int", str),
    datetime: ("datetime", datetime.isoformat),
    date: ("date", date.isoformat),
    time: ("time", _time_text),
    timedelta: ("timedelta_us", lambda length: _whole(length // MICROSECOND)),
    Decimal: ("decimal", str),
    **dict.fromkeys((bytes, bytearray), ("bytes", lambda some: base64.b64encode(some).decode())),
    # A view may skip bytes, which only its copy does not.
    memoryview: ("bytes", lambda some: base64.b64encode(some.tobytes()).decode()),
    uuid.UUID: ("uuid", str),
}

_FLAT: Final = _OF_JSON | _WORDS.keys()
_RESERVED: Final = frozenset({_TYPES, _VALUE})
_UTC_ZONE: Final = ZoneInfo("UTC")


def _has_same_text(moment: datetime) -> bool:
    """Return True if orjson is known to write the same as `datetime.isoformat`: it cuts the seconds of an offset."""
    zone = moment.tzinfo
    return zone is None or zone is UTC or zone is _UTC_ZONE


def _placed(error: InvalidError, pointer: str) -> InvalidError:
    return InvalidError(error.message, part=part_name(pointer), **error.details)


def as_python(value: Any) -> Any:
    """Return a value of NumPy's or Pandas' as Python's, null if it is missing; any other stays as it is."""
    if type(value) in OF_PYTHON:
        return value
    if isinstance(value, np.ndarray | np.generic):
        return _of_numpy(value)
    return _of_pandas(value) if type(value).__module__.partition(".")[0] == "pandas" else value


def _of_numpy(value: Any) -> Any:
    kind = value.dtype.kind
    if kind not in "mM":
        return value.tolist()
    unit = np.datetime_data(value.dtype)[0]
    if kind == "m" and unit in _UNITS_WITHOUT_LENGTH and not np.isnat(value).all():
        raise InvalidError("a duration must be in weeks or a shorter unit", value=value, unit=unit)
    exact = value.astype(f"{kind}8[us]")
    if not np.array_equal(exact.astype(value.dtype), value, equal_nan=True):
        raise InvalidError("a time is no whole number of microseconds, or of more than 64 bits", value=value)
    if int in set(map(type, exact.ravel().tolist())):
        raise InvalidError("a time must lie in the years 1 to 9999", value=value)
    return exact.tolist()


def _of_pandas(value: Any) -> Any:
    """Return Python's value for one of Pandas', whose missing values are null in every column; else the same."""
    if type(value).__name__ in _MISSING:
        return None
    if not isinstance(value, datetime | timedelta):
        # A series, an index or an array, with pandas' missing values.
        return _with_nulls(value.tolist()) if hasattr(value, "tolist") else value
    if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
        raise InvalidError("a time is no whole number of microseconds", value=value)
    plain: Any = value
    return plain.to_pydatetime() if isinstance(value, datetime) else plain.to_pytimedelta()


def _with_nulls(parts: list[Any]) -> list[Any]:
    return [None if isinstance(part, float) and math.isnan(part) else part for part in parts]


OF_PYTHON: Final = frozenset({*_OF_JSON, *_WORDS, list, tuple, dict}) - {type(None)}
"""Types of values that are neither null nor of NumPy or Pandas."""
_MISSING: Final = frozenset({"NaTType", "NAType"})
_UNITS_WITHOUT_LENGTH: Final = ("Y", "M", "generic")


def refused(pointer: str, value: Any) -> NoReturn:
    """Refuse an object that is no value; a `Substitute`."""
    if type(value) is str:
        raise InvalidError(
            "a part of the value is text with half a character (a lone surrogate), which values cannot have: mend it, "
            "for example with text.encode(errors='replace').decode()",
            part=part_name(pointer),
            type="str",
            text=ascii(value),
        )
    raise InvalidError(
        "a part of the value has a type that values cannot have: make it text, a number, a time, a list or a dict",
        part=part_name(pointer),
        type=type(value).__qualname__,
    )


def has_utf8(text: str) -> bool:
    """Return False for text with a lone surrogate, which has no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _depth(pointer: str) -> int:
    return pointer.count("/")


def _step(holder: Any, name: str) -> Any:
    return int(name) if isinstance(holder, list) else name.replace("~1", "/").replace("~0", "~")


def _read_mapping(pairs: list[Any]) -> dict[Any, Any]:
    return {_as_key(name): part for name, part in pairs}


def _as_key(name: Any) -> Any:
    return tuple(map(_as_key, name)) if isinstance(name, list) else name


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "int": int,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta_us": lambda micros: timedelta(microseconds=int(micros)),
    "decimal": Decimal,
    "bytes": base64.b64decode,
    "uuid": uuid.UUID,
    _PLAIN: PlainObject,
    "mapping": _read_mapping,
}
