"""Exact sums of numbers or of durations, as plain JSON data; a retracted one leaves no trace.

A float is added without rounding, after Shewchuk. The sum of the floats is kept as the shortest list of
floats that add up to it, whose first is the sum rounded once. `math.fsum` finds them one after the
other. The list follows from the exact sum alone, so the order of additions and merges does not
matter (J. R. Shewchuk, "Adaptive Precision Floating-Point Arithmetic", 1997).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from operator import index, neg
from typing import Any, Final, TypeAlias

from millpond.statestore.durations import MICROSECOND
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import as_python

Total: TypeAlias = int | float | dict[str, Any] | None
"""A sum as plain JSON data.

`NOTHING`, which is ``False``, is the total of no elements, and ``None`` that of nulls alone. Otherwise it is an ``int`` as long as all numbers are whole, and otherwise an object with ``floats``, the number
of floats added, and ``parts``, their sum. Further fields stand only where they are needed: ``ints``, the sum of the
whole numbers; ``inf``, ``-inf`` and ``nan``, the count of each; ``scales``, the count of decimals by the number of their
digits behind the point, and ``digits``, their sum in units of the last of these digits; ``durations``, the count of durations,
and ``micros``, their sum in microseconds; ``units``, in place of ``parts``, the sum
in multiples of the smallest float as hexadecimal text, where it lies beyond the range of floats. A ``float``
is a total that an earlier version has stored.
"""

NOTHING: Final = False
_FLOAT: Final = frozenset({float})
_NUMBERS: Final = frozenset({int, float, bool})
_FIELDS: Final = 3
_FIELDS_WITHOUT_INTS: Final = 2
_SPECIAL: Final = ("inf", "-inf", "nan")
# Every finite float is a multiple of the smallest, 2**-1074.
_UNITS_IN_ONE: Final = 1 << 1074
# The bounds of whole numbers in JSON: 64 bits, with a sign or without.
_JSON_MIN: Final = -(2**63)
_JSON_MAX: Final = 2**64 - 1
# The greatest whole number up to which floats are exact.
_EXACT_INT_MAX: Final = 2**53
_MORE_DIGITS: Final = 4


def with_number(total: Total, number: Any) -> Total:
    # The most frequent cases first: whole numbers alone, floats alone, then both.
    kind = type(number)
    if kind is int and isinstance(total, int):
        return _whole(total + number)
    if kind is float and isinstance(total, dict) and len(total) == _FIELDS_WITHOUT_INTS:
        summed = _parts([*total["parts"], number]) if "parts" in total else None
        if summed:
            return {"floats": total["floats"] + 1, "parts": summed}
    plain = _plain_fields(total)
    if plain is None or kind not in _NUMBERS:
        return _changed(total, (number,), 1)
    floats, parts, ints = plain
    if kind is not float:
        return _plain_total(floats, list(parts), ints + number)
    summed = _parts([*parts, number])
    return _changed(total, (number,), 1) if summed is None else _plain_total(floats + 1, summed, ints)


def with_numbers(total: Total, numbers: Sequence[Any]) -> Total:
    if len(numbers) == 1:
        return with_number(total, numbers[0])
    return _changed(total, numbers, 1) if numbers else total


def without(total: Total, numbers: Sequence[Any]) -> Total:
    return _changed(total, numbers, -1) if numbers else total


def _changed(total: Total, numbers: Sequence[Any], sign: int) -> Total:
    kinds = set(map(type, numbers))
    if kinds <= _NUMBERS:
        if float not in kinds and isinstance(total, int):
            return _whole(total + sign * sum(numbers))
        plain = _plain_fields(total)
        if plain is not None:
            changed = _changed_plainly(*plain, numbers, sign, is_all_floats=kinds == _FLOAT)
            if changed is not None:
                return changed
    known = [number for number in map(as_python, numbers) if number is not None]
    if not known:
        return None if total is NOTHING else total
    opened = _Opened.of(total)
    for number in known:
        opened.add(_plain(number), sign)
    return opened.closed()


def _changed_plainly(
    floats: int, parts: Sequence[float], ints: int, numbers: Sequence[Any], sign: int, *, is_all_floats: bool
) -> Total | None:
    """Return the changed total by the fast way; ``None`` where the sum is not finite."""
    added = numbers
    if not is_all_floats:
        added = [number for number in numbers if type(number) is float]
        ints += sign * sum(number for number in numbers if type(number) is not float)
    summed = _parts([*parts, *(added if sign > 0 else map(neg, added))])
    return None if summed is None else _plain_total(floats + sign * len(added), summed, ints)


def _plain_total(floats: int, parts: list[float], ints: int) -> Total:
    if not (floats or parts):
        return _whole(ints)
    return (
        {"floats": floats, "parts": parts, "ints": _stored_int(ints)}
        if ints
        else {"floats": floats, "parts": parts}
    )


def merged(totals: Sequence[Total]) -> Total:
    numbers = [total for total in totals if total is not None and total is not NOTHING]
    if not numbers:
        return None if None in totals else NOTHING
    plain = list(map(_plain_fields, numbers))
    if None not in plain:
        known = [fields for fields in plain if fields is not None]
        summed = _parts([part for _, parts, _ in known for part in parts])
        if summed is not None:
            floats, ints = sum(fields[0] for fields in known), sum(fields[2] for fields in known)
            return _plain_total(floats, summed, ints)
    joined = _Opened()
    for total in numbers:
        joined.join(_Opened.of(total))
    return joined.closed()


def number_of(total: Total) -> int | float | Decimal | timedelta | None:
    """Return the sum: whole, a decimal as long as no float is in it, else the float nearest to the exact sum; or a duration.

    It is 0 of no elements, and ``None`` of nulls alone.

    As in IEEE 754, a sum beyond the range of floats is infinite; both infinities, or a NaN, make NaN.
    """
    if not isinstance(total, dict):
        return 0 if total is NOTHING else total
    plain = _plain_fields(total)
    if plain is not None:
        _, parts, ints = plain
        if not ints:
            return parts[0] if parts else 0.0
        if abs(ints) <= _EXACT_INT_MAX:
            return math.fsum([ints, *parts])
    opened = _Opened.of(total)
    if opened.has_durations:
        return timedelta(microseconds=opened.micros)
    if not opened.has_floats:
        return opened.decimal(opened.scale, 1) if opened.scales else opened.ints
    return opened.special() or _ratio(*opened.ratio())


def quotient(total: Total, count: int) -> float | Decimal | timedelta:
    """Return the exact sum divided by ``count``, which must not be zero.

    It is the nearest float; of decimals one with four more digits behind the point, as in Spark's ``avg``; of durations
    the nearest in whole microseconds.
    """
    if isinstance(total, int | float):
        return total / count
    plain = _plain_fields(total)
    if plain is not None and len(plain[1]) <= 1 and not plain[2]:
        return sum(plain[1]) / count
    opened = _Opened.of(total)
    if opened.has_durations:
        return timedelta(microseconds=round(Fraction(opened.micros, count)))
    if opened.scales and not opened.has_floats:
        return opened.decimal(opened.scale + _MORE_DIGITS, count)
    special = opened.special()
    numerator, denominator = opened.ratio()
    return special / count if special else _ratio(numerator, count * denominator)


@dataclass(slots=True)
class _Opened:
    """A total in its general form: any mixture of numbers, or durations."""

    ints: int = 0
    floats: int = 0
    finite: list[float] = field(default_factory=list)
    units: int = 0
    specials: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SPECIAL, 0))
    scales: dict[int, int] = field(default_factory=dict)
    digits: int = 0
    durations: int = 0
    micros: int = 0

    @classmethod
    def of(cls, total: Total) -> _Opened:
        if isinstance(total, int):
            return cls(ints=total)
        if isinstance(total, float):
            return cls(floats=1, finite=[total])
        if total is None:
            return cls()
        return cls(
            ints=int(total.get("ints", 0)),
            floats=total.get("floats", 0),
            finite=list(total.get("parts", ())),
            units=int(total.get("units", "0"), 16),
            specials={name: total.get(name, 0) for name in _SPECIAL},
            scales={int(scale): count for scale, count in total.get("scales", {}).items()},
            digits=int(total.get("digits", 0)),
            durations=total.get("durations", 0),
            micros=int(total.get("micros", 0)),
        )

    @property
    def has_floats(self) -> bool:
        return bool(self.floats or self.finite or self.units or any(self.specials.values()))

    @property
    def has_durations(self) -> bool:
        return bool(self.durations or self.micros)

    @property
    def scale(self) -> int:
        """The number of digits behind the point of the decimals, of which `digits` counts the last."""
        return max(self.scales, default=0)

    def _count(self, scale: int, count: int, digits: int) -> None:
        """Add a sum of decimals, in units of the last of ``scale`` digits behind the point."""
        before = self.scale
        highest = max(before, scale)
        total = self.digits * 10 ** (highest - before) + digits * 10 ** (highest - scale)
        counts = {**self.scales, scale: self.scales.get(scale, 0) + count}
        self.scales = {scale: count for scale, count in counts.items() if count}
        # A retraction may come before its number: then digits are left beyond the last of any number present.
        while highest > self.scale and not total % 10:
            highest, total = highest - 1, total // 10
        if highest > self.scale or (total and not self.scales):
            self.scales[highest] = 0
        self.digits = total

    def decimal(self, scale: int, count: int) -> Decimal:
        """Return the sum of whole numbers and decimals divided by ``count``, rounded half up to so many digits."""
        numerator = self.digits + self.ints * 10**self.scale
        twice, halves = 2 * abs(numerator) * 10 ** (scale - self.scale), 2 * count
        unscaled = (twice + count) // halves
        return Decimal((int(numerator < 0), tuple(map(int, str(unscaled))), -scale))

    def ratio(self) -> tuple[int, int]:
        """Return the exact sum of all finite numbers as a numerator and a denominator."""
        ones = 10**self.scale
        return self.in_units() * ones + self.digits * _UNITS_IN_ONE, ones * _UNITS_IN_ONE

    def add(self, number: float | Decimal | timedelta, sign: int) -> None:
        if isinstance(number, int):
            self.ints += sign * number
            return
        if isinstance(number, timedelta):
            self.durations += sign
            self.micros += sign * (number // MICROSECOND)
            return
        if isinstance(number, Decimal):
            _, digits, exponent = number.as_tuple()
            if isinstance(exponent, int):
                scale = max(0, -exponent)
                unscaled = int("".join(map(str, digits))) * 10 ** max(0, exponent)
                self._count(scale, sign, sign * (-unscaled if number.is_signed() else unscaled))
                return
            number = float("nan" if number.is_nan() else number)
        self.floats += sign
        if math.isfinite(number):
            self.finite.append(sign * number)
        else:
            self.specials[str(number)] += sign

    def join(self, other: _Opened) -> None:
        self.ints += other.ints
        self.floats += other.floats
        self.finite += other.finite
        self.units += other.units
        self.durations += other.durations
        self.micros += other.micros
        for name in _SPECIAL:
            self.specials[name] += other.specials[name]
        for scale, count in other.scales.items():
            self._count(scale, count, other.digits if scale == other.scale else 0)

    def closed(self) -> Total:
        """Return the total as plain data, in the one form of this sum and count of floats."""
        fields: dict[str, Any] = {"floats": self.floats}
        parts = None if self.units else _parts(list(self.finite))
        if parts is None:
            units = self.units + sum(map(_units, self.finite))
            parts = _parts_of_units(units)
            if parts is None:
                fields["units"] = hex(units)
        if parts is not None:
            fields["parts"] = parts
        counts: dict[str, Any] = {name: count for name, count in self.specials.items() if count}
        if self.scales:
            counts |= {"scales": {str(scale): count for scale, count in sorted(self.scales.items())}}
            counts |= {"digits": str(self.digits)}
        if self.has_durations:
            if self.floats or parts or counts or self.ints or "units" in fields:
                raise InvalidError("a sum or mean must be of numbers or of durations, got both")
            counts = {"durations": self.durations, "micros": _stored_int(self.micros)}
        if not (self.floats or parts or counts) and "units" not in fields:
            return _whole(self.ints)
        if self.ints:
            fields["ints"] = _stored_int(self.ints)
        return {**fields, **counts}

    def special(self) -> float:
        """Return the sum if it is not finite, otherwise 0; a retraction without its number makes a count negative."""
        counts = self.specials
        if counts["nan"]:
            return math.nan
        up, down = counts["inf"], counts["-inf"]
        is_up, is_down = up > 0 or down < 0, down > 0 or up < 0
        if is_up and is_down:
            return math.nan
        return math.inf if is_up else -math.inf if is_down else 0.0

    def in_units(self) -> int:
        return self.units + sum(map(_units, self.finite)) + self.ints * _UNITS_IN_ONE


def _plain_fields(total: Total) -> tuple[int, Sequence[float], int] | None:
    """Return count and parts of the floats, and the sum of whole numbers; ``None`` for a total with other fields."""
    if isinstance(total, int):
        return 0, (), total
    if not isinstance(total, dict) or "parts" not in total:
        return None
    size = len(total)
    if size == _FIELDS_WITHOUT_INTS:
        return total["floats"], total["parts"], 0
    ints = total.get("ints")
    return (total["floats"], total["parts"], ints) if size == _FIELDS and type(ints) is int else None


def _parts(numbers: list[float]) -> list[float] | None:
    """Return the parts of the sum of ``numbers``, greatest first; ``None`` if a number or partial sum is not finite.

    The given list is modified.
    """
    try:
        part = math.fsum(numbers)
        if part - part:  # infinities and NaN make NaN
            return None
        parts: list[float] = []
        while part:
            parts.append(part)
            numbers.append(-part)
            part = math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond the range of floats, or both infinities
        return None
    return parts


def _parts_of_units(units: int) -> list[float] | None:
    """Return the parts of a sum in multiples of the smallest float; ``None`` beyond the range of floats."""
    parts: list[float] = []
    while units:
        part = _ratio(units, _UNITS_IN_ONE)
        if math.isinf(part):
            return None
        parts.append(part)
        units -= _units(part)
    return parts


def _units(number: float) -> int:
    numerator, denominator = number.as_integer_ratio()
    return numerator * (_UNITS_IN_ONE // denominator)


def _ratio(numerator: int, denominator: int) -> float:
    """Return the float nearest to a quotient of whole numbers; infinite beyond the range."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if (numerator > 0) == (denominator > 0) else -math.inf


def _whole(number: int) -> Total:
    stored = _stored_int(number)
    return stored if isinstance(stored, int) else {"ints": stored}


def _stored_int(number: int) -> int | str:
    return number if _JSON_MIN <= number <= _JSON_MAX else str(number)


def _plain(number: Any) -> int | float | Decimal | timedelta:
    if isinstance(number, float):
        return float(number)
    if isinstance(number, Decimal | timedelta):
        return number
    try:
        return int(index(number))
    except TypeError as cause:
        raise InvalidError(
            "sums and means are of whole numbers, decimals, floats and durations",
            type=type(number).__qualname__,
        ) from cause


def with_squares(squares: str, numbers: Iterable[Any], sign: int) -> str:
    """Return the exact sum of the squares of finite numbers, with those of ``numbers`` added or removed."""
    by_denominator: dict[int, int] = {}
    for number in map(_plain, numbers):
        if isinstance(number, timedelta):
            raise InvalidError("standard deviations are of whole numbers, decimals and floats", value=number)
        try:
            numerator, denominator = number.as_integer_ratio()
        except (OverflowError, ValueError):  # infinities and NaN
            continue
        by_denominator[denominator] = by_denominator.get(denominator, 0) + numerator**2
    added = (Fraction(total, denominator**2) for denominator, total in by_denominator.items())
    return _fraction_text(_fraction(squares) + sign * sum(added, Fraction()))


def merged_squares(squares: Iterable[str]) -> str:
    return _fraction_text(sum(map(_fraction, squares), Fraction()))


def deviation(total: Total, squares: str, count: int, divisor: int) -> float:
    """Return the square root, rounded once, of the sum of squared differences from the mean, divided by ``divisor``."""
    opened = _Opened.of(total)
    if opened.special():
        return math.nan
    # Retractions that came before their numbers can make it negative.
    spread = max(Fraction(), _fraction(squares) - Fraction(*opened.ratio()) ** 2 / count)
    return _root(spread / divisor)


def _root(number: Fraction) -> float:
    numerator, denominator = number.as_integer_ratio()
    # At least 55 bits of the root, the last of which is set if any behind it is: then the quotient is rounded once.
    shift = max(0, 112 - numerator.bit_length() + denominator.bit_length()) // 2 + 1
    square, rest = divmod(numerator << 2 * shift, denominator)
    root = math.isqrt(square)
    return _ratio(root | (rest > 0 or root**2 < square), 1 << shift)


def _fraction(text: str) -> Fraction:
    numerator, denominator = text.split("/")
    return Fraction(int(numerator, 16), int(denominator, 16))


def _fraction_text(number: Fraction) -> str:
    # Python refuses to write whole numbers of thousands of digits as decimal text.
    return f"{number.numerator:x}/{number.denominator:x}"
