"""The text of a typed key: a tuple of values in a form whose order is that of the tuples.

The engine's key is text: rows are sorted by it, cut into intervals and pruned. A typed key is a tuple of values. Its text
has a tab for each value, a mark of the type, and the value:

======================  ============================================  =======================
value                   text                                          for example
======================  ============================================  =======================
null                    ``!``                                         ``!``
false, true             ``?0``, ``?1``                                ``?1``
text                    ``=`` and the text                            ``=no``
whole number            a letter for the number of digits, digits     ``d4711``
decimal                 ``#``, the same, without zeros at the end     ``#b12.5``
float                   ``~`` and 16 hexadecimal digits               ``~BFF8000000000000``
date                    ``@`` and the date                            ``@2026-11-23``
timestamp               ``z`` and the time in UTC                     ``z2026-11-23 17:36:50.5``
timestamp without zone  ``t`` and the time                            ``t2026-11-23 17:36:50``
binary                  ``x`` and hexadecimal digits                  ``x00FF``
struct                  ``{`` and names; then each value as a part    ``{a,b`` tab ``a1`` tab ``!``
======================  ============================================  =======================

A tab ends a value and is less than any character within a value, because a control character in a text is written as
U+001F and its caret letter. So texts compare as tuples do, value by value, nulls first: each mark is greater than that
of null. Negative numbers have each digit subtracted from 9, under a letter that falls as their length rises. Floats are
their bits, with the sign turned so that they rise: NaN is above all, and -0.0 is 0.0. `docs/design/018-keys.md` has the
reasons. A key that does not begin with a tab is plain: the text of a single column. A text of data that begins with one
becomes the typed key of this value, so that no text is taken for another key.

This module also names types as a store records them, for the columns of keys and for the parts of states.
"""

from __future__ import annotations

import datetime as dt
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from types import NoneType
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from millpond.statestore.errors import InvalidError

KeyValue: TypeAlias = (
    "bool | int | float | str | bytes | Decimal | dt.date | dt.datetime | Mapping[str, KeyValue] | None"
)
"""A value of a typed key; a mapping is a struct, with its fields in the mapping's order."""

# The beginning of each value of a typed key.
PART: Final = "\t"
# The mark before the caret letter of a control character.
ESCAPE: Final = "\x1f"
# A null: less than every other mark.
NULL: Final = "!"
# The characters that are escaped in values.
CONTROLS: Final = "".join(map(chr, range(32)))
# The digits that a decimal may have before the point, and after it.
DIGITS_MAX: Final = 38
# Letters that rise with the number of digits before the point; for more than 25 there are two.
RISING: Final[tuple[str, ...]] = ("", *"abcdefghijklmnopqrstuvwxy", *(f"z{more}" for more in "abcdefghijklm"))
# Letters that fall with the number of digits, for negative numbers.
FALLING: Final[tuple[str, ...]] = (
    "",
    *"ZYXWVUTSRQPONMLKJIHGFEDCB",
    *(f"A{more}" for more in "zyxwvutsrqpon"),
)

_INT_MIN: Final = -(2**63)
_INT_MAX: Final = 2**63 - 1
_SIGN_BIT: Final = 1 << 63
_ALL_BITS: Final = (1 << 64) - 1
_HEX_DIGITS: Final = 16
_CONTROL: Final = re.compile("[\x00-\x1f]")
_IN_NAME: Final = re.compile("[\x00-\x1f,]")
_ESCAPED: Final = re.compile("\x1f(.)", re.DOTALL)
_NINES: Final = str.maketrans("0123456789", "9876543210")
_INT: Final = re.compile(r"(?:[a-s]|[H-Z])[0-9]+\Z")
_DECIMAL: Final = re.compile(
    r"(?P<length>[B-Z]|A[n-z]|[a-y]|z[a-m])(?P<digits>[0-9]+)(?P<rest>(?:\.[0-9]+)?)(~?)\Z"
)


def is_typed(text: str) -> bool:
    return text.startswith(PART)


def encode_key(values: Sequence[KeyValue]) -> str:
    r"""Return the text of a typed key, given at least one value.

    Compared as text, keys have the order of their tuples: value by value, nulls first, NaN last. Equal values of one type
    have one text, whichever program wrote them: a decimal loses the zeros at its end, a float has the same text in either
    width, and a time is one instant.

    Raises:
        InvalidError: a value is of another type or out of range: whole numbers have 64 bits, decimals 38 digits before
            and after the point, and text needs a UTF-8 form.

    Example:
        >>> encode_key(("no", 4711))
        '\t=no\td4711'
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence) or not values:
        raise InvalidError("a typed key must be a tuple of at least one value", type=type(values).__name__)
    text = "".join([PART + _encoded(value) for value in values])
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as cause:
            raise InvalidError("the key has no UTF-8 form", key=ascii(text)) from cause
    return text


def plain_key(text: str) -> str:
    r"""Return the key of a text out of data: itself, unless it begins like a typed key; then the typed key of this value.

    Example:
        >>> plain_key("no"), plain_key("\td4711")
        ('no', '\t=\x1fId4711')
    """
    return encode_key((text,)) if text.startswith(PART) else text


def key_of_text(text: str) -> str:
    """Return the key that code or a command gives as text: of a typed key exactly its text, else as `plain_key`."""
    if not text.startswith(PART):
        return text
    try:
        if encode_key(decode_key(text)) == text:
            return text
    except InvalidError:
        pass  # no text of a typed key
    return plain_key(text)


def decode_key(text: str) -> tuple[Any, ...]:
    r"""Return the values of a typed key, or of a plain key a tuple of just its text.

    The values have the types of Arrow's: ``None``, ``bool``, ``str``, ``int``, ``Decimal``, ``float``, ``date``,
    ``datetime`` in UTC or without a zone, ``bytes``, and ``dict`` for a struct. A decimal equals the original, without the
    zeros at its end.

    Raises:
        InvalidError: the text begins like that of a typed key, but is malformed.

    Example:
        >>> decode_key("\t=no\td4711"), decode_key("4711")
        (('no', 4711), ('4711',))
    """
    if not text.startswith(PART):
        return (text,)
    parts = iter(text.split(PART)[1:])
    try:
        return tuple(_decoded(part, parts) for part in parts)
    except (ValueError, IndexError, StopIteration, OverflowError, RuntimeError, struct.error) as cause:
        raise InvalidError("this is not the text of a typed key", key=ascii(text)) from cause


def escaped(text: str) -> str:
    return _CONTROL.sub(_caret, text) if _CONTROL.search(text) else text


def struct_mark(names: Sequence[str]) -> str:
    """Return the beginning of a struct with these fields; the values follow, each as a part."""
    if not names or len(set(names)) != len(names):
        raise InvalidError(
            "a struct in a key must have at least one field, and distinct names", fields=list(names)
        )
    return "{" + ",".join([_IN_NAME.sub(_caret, name) for name in names])


def _caret(match: re.Match[str]) -> str:
    return ESCAPE + chr(ord(match.group()) + 64)


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(ord(match.group(1)) - 64), text) if ESCAPE in text else text


def is_missing(value: object) -> bool:
    """Return True for a null in rows of Python objects: ``None``, and what pandas takes for one, ``NaN`` included."""
    return value is None or _is_no_value(value) or (isinstance(value, float) and math.isnan(value))


def _is_no_value(value: object) -> bool:
    # By name, because pandas need not be there.
    return type(value).__name__ in ("NaTType", "NAType") or (
        isinstance(value, np.datetime64) and np.isnat(value)
    )


def _encoded(value: object) -> str:
    return _encoder_of(value)(value)


def check_key_value(value: object) -> None:
    """Raise unless keys are made of values of this type, whether or not of this value."""
    _encoder_of(value)


def _encoder_of(value: object) -> Callable[[Any], str]:
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder
    if _is_no_value(value):
        return _ENCODERS[NoneType]
    # In the order of the table: a bool is an int, and a datetime is a date.
    encoder = next((each for kind, each in _ENCODERS.items() if isinstance(value, kind)), None)
    if encoder is None:
        raise InvalidError(
            "a key has no values of this type: it is made of text, whole numbers, decimals, floats, booleans, dates, "
            "times, bytes, mappings of these, and nulls",
            type=type(value).__name__,
        )
    return encoder


def _of_bytes(value: bytes) -> str:
    return "x" + bytes(value).hex().upper()


def _of_int(value: int) -> str:
    if not _INT_MIN <= value <= _INT_MAX:
        raise InvalidError(
            "a whole number in a key has 64 bits at most: make it text or a decimal", number=value
        )
    if value >= 0:
        digits = str(int(value))
        return RISING[len(digits)] + digits
    digits = str(-value)
    return FALLING[len(digits)] + digits.translate(_NINES)


def _of_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise InvalidError("a decimal in a key must be finite", number=value)
    if not value:
        return "#a0"
    is_wide = not -DIGITS_MAX <= value.adjusted() < DIGITS_MAX
    whole, _, fraction = ("", "", "") if is_wide else format(value.copy_abs(), "f").partition(".")
    fraction = fraction.rstrip("0")
    if is_wide or len(fraction) > DIGITS_MAX:
        raise InvalidError(
            "a decimal in a key has 38 digits at most before the point, and after it: round it", number=value
        )
    digits = f"{whole}.{fraction}" if fraction else whole
    if value >= 0:
        return f"#{RISING[len(whole)]}{digits}"
    return f"#{FALLING[len(whole)]}{digits.translate(_NINES)}~"


def _of_float(value: float) -> str:
    # Spark groups all NaNs together, and both zeros, so each has one text.
    number = float("nan") if value != value else value + 0.0  # noqa: PLR0124 - only NaN differs from itself
    (bits,) = struct.unpack(">Q", struct.pack(">d", number))
    return f"~{bits ^ (_ALL_BITS if bits & _SIGN_BIT else _SIGN_BIT):016X}"


def _of_time(value: dt.datetime) -> str:
    if value.tzinfo is None:
        return "t" + _time_text(value)
    try:
        return "z" + _time_text(value.astimezone(dt.UTC))
    except OverflowError as cause:
        raise InvalidError("a time in a key must be in the years 1 to 9999 in UTC", time=value) from cause


def _time_text(value: dt.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(sep=" ")
    return text.rstrip("0") if value.microsecond else text


def _of_struct(value: Mapping[Any, object]) -> str:
    names = list(value)
    if not all(isinstance(name, str) for name in names):
        raise InvalidError("the names of the fields of a struct in a key must be text", fields=names)
    return PART.join([struct_mark(names), *map(_encoded, value.values())])


_ENCODERS: Final[dict[type, Callable[[Any], str]]] = {
    str: lambda value: "=" + escaped(value),
    bool: lambda value: "?1" if value else "?0",
    int: _of_int,
    NoneType: lambda _: NULL,
    float: _of_float,
    Decimal: _of_decimal,
    dt.datetime: _of_time,
    dt.date: lambda value: "@" + value.isoformat(),
    bytes: _of_bytes,
    bytearray: _of_bytes,
    memoryview: _of_bytes,
    Mapping: _of_struct,
}


def _decoded(part: str, parts: Iterator[str]) -> Any:
    mark, rest = part[0], part[1:]
    if mark == "{":
        names = [_unescaped(name) for name in rest.split(",")]
        return {name: _decoded(next(parts), parts) for name in names}
    decoder = _DECODERS.get(mark)
    return _to_int(part) if decoder is None else decoder(rest)


def _to_null(rest: str) -> None:
    if rest:
        raise ValueError(rest)


def _to_int(part: str) -> int:
    if _INT.match(part) is None:
        raise ValueError(part)
    return int(part[1:]) if part[0] >= "a" else -int(part[1:].translate(_NINES))


def _to_decimal(part: str) -> Decimal:
    found = _DECIMAL.match(part)
    if found is None:
        raise ValueError(part)
    number = found["digits"] + found["rest"]
    # Unlike a minus sign, this does not round to the digits of the context.
    return Decimal(number) if found["length"][0] >= "a" else Decimal(number.translate(_NINES)).copy_negate()


def _to_float(rest: str) -> float:
    if len(rest) != _HEX_DIGITS:
        raise ValueError(rest)
    bits = int(rest, 16)
    turned = bits ^ (_SIGN_BIT if bits & _SIGN_BIT else _ALL_BITS)
    return float(struct.unpack(">d", struct.pack(">Q", turned))[0])


_DECODERS: Final[dict[str, Callable[[str], Any]]] = {
    "!": _to_null,
    "=": _unescaped,
    "?": lambda rest: ("0", "1").index(rest) == 1,
    "#": _to_decimal,
    "~": _to_float,
    "@": dt.date.fromisoformat,
    "z": lambda rest: dt.datetime.fromisoformat(rest).replace(tzinfo=dt.UTC),
    "t": dt.datetime.fromisoformat,
    "x": bytes.fromhex,
}


NAMED_KINDS: Final[dict[pa.DataType, str]] = {
    pa.null(): "void",
    pa.string(): "string",
    pa.bool_(): "boolean",
    pa.int8(): "byte",
    pa.int16(): "short",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.date32(): "date",
    pa.timestamp("us", "UTC"): "timestamp",
    pa.timestamp("us"): "timestamp_ntz",
    pa.binary(): "binary",
}
"""The types whose name is one word; decimals, structs, arrays and maps have compound names."""

_KINDS: Final = {name: kind for kind, name in NAMED_KINDS.items()}


def name_of_kind(kind: pa.DataType) -> Any:
    """Return a type's name: text, or a JSON object for a type with parts; a `KeyError` means that it has none."""
    if pa.types.is_struct(kind):
        return {"struct": [[field.name, name_of_kind(field.type)] for field in kind]}
    if pa.types.is_list(kind):
        return {"array": name_of_kind(kind.value_type)}
    if pa.types.is_map(kind):
        return {"map": [name_of_kind(kind.key_type), name_of_kind(kind.item_type)]}
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return NAMED_KINDS[kind]


def kind_of_name(name: Any) -> pa.DataType:
    """Return the type of a name, all parts nullable; an unknown name raises a Key-, Value- or TypeError."""
    if isinstance(name, dict):
        ((form, parts),) = name.items()
        if form == "struct":
            return pa.struct([(field, kind_of_name(kind)) for field, kind in parts])
        if form == "array":
            return pa.list_(kind_of_name(parts))
        if form == "map":
            return pa.map_(*map(kind_of_name, parts))
        raise KeyError(form)
    if name.startswith("decimal("):
        return pa.decimal128(*map(int, name.removeprefix("decimal(").rstrip(")").split(",")))
    return _KINDS[name]
