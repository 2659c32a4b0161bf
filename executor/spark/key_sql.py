"""Keys in Spark SQL: the texts of typed keys, as `encode_key` makes them, and the interval that owns a key.

Only expressions that Spark compiles are used, so that a key costs no Python stage. They do not depend on the session:
neither on its time zone nor on ANSI mode, without which small decimals become text with an exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812 - the name that every Spark user knows

from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.key_text import CONTROLS, ESCAPE, NULL, PART, struct_mark

_DIGITS: Final = "'0123456789', '9876543210'"
_LETTERS: Final = 25  # numbers of digits before the point up to this have one letter
_PLAIN_SCALE: Final = 6  # Spark writes no decimal of this scale or less with an exponent
_DATES: Final = "DATE'0001-01-01' AND DATE'9999-12-31'"
_MICROS: Final = "-62135596800000000L AND 253402300799999999L"
_EPOCH: Final = "TIMESTAMP_NTZ'1970-01-01 00:00:00'"
_SIGN: Final = "-9223372036854775808"
_MANTISSA: Final = "4503599627370496"  # 2**52
_REPEATED: Final = (T.ArrayType, T.MapType)


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    # In hexadecimal no character needs escaping, and Spark evaluates the cast when it plans.
    return f"CAST(X'{text.encode().hex()}' AS STRING)"


def check_key_type(kind: T.DataType, column: str) -> None:
    """Raise unless a key can be made of the column: of a type with an order that both runners share."""
    if isinstance(kind, T.StructType):
        struct_mark(kind.names)
        for field in kind.fields:
            check_key_type(field.dataType, f"{column}.{field.name}")
        return
    if isinstance(kind, _REPEATED):
        raise InvalidError(
            "a key is made of single values: take elements of the array or map as columns of their own, or its JSON text",
            column=column,
            type=kind.simpleString(),
        )
    if not isinstance(kind, tuple(_TYPES)):
        raise InvalidError(
            "no key is made of this type: cast the column to text, a whole number, a decimal, a float, a boolean, a date, "
            "a timestamp or binary",
            column=column,
            type=kind.simpleString(),
        )


def arrow_key_columns(schema: T.StructType) -> tuple[pa.Field, ...]:
    return tuple(
        pa.field(field.name, _arrow_type(field.dataType)) for field in schema if _is_key_type(field.dataType)
    )


def _arrow_type(kind: T.DataType) -> pa.DataType:
    if isinstance(kind, T.StructType):
        return pa.struct([(field.name, _arrow_type(field.dataType)) for field in kind])
    if isinstance(kind, T.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    return next(arrow for of_kind, (_, arrow) in _TYPES.items() if isinstance(kind, of_kind))


def _is_key_type(kind: T.DataType) -> bool:
    try:
        check_key_type(kind, "")
    except InvalidError:
        return False
    return True


def key_sql(columns: Sequence[tuple[str, T.DataType]]) -> str:
    """Return SQL for the text of a key of these columns, each an expression with its type.

    The text is null where a date or time is not in the years 1 to 9999.
    """
    parts = [f"{literal(PART)}, {_part(sql, kind)}" for sql, kind in columns]
    return f"concat({', '.join(parts)})"


def plain_key_sql(column: str) -> str:
    """Return SQL for the key of a column of text; see `plain_key`."""
    typed = key_sql([(column, T.StringType())])
    return f"if(startswith({column}, {literal(PART)}), {typed}, {column})"


def _part(sql: str, kind: T.DataType) -> str:
    encoder = next(encoder for of_kind, (encoder, _) in _TYPES.items() if isinstance(kind, of_kind))
    return encoder(sql, kind)


_NULL: Final = literal(NULL)


def _of_text(sql: str, _: T.DataType) -> str:
    # Put the escape before each control character, then replace the other control characters by their caret letters.
    marked = f"regexp_replace({sql}, r'([\\x00-\\x1F])', {literal(ESCAPE + '$1')})"
    doubled = f"replace({marked}, {literal(ESCAPE * 2)}, {literal(ESCAPE + '_')})"
    controls = CONTROLS.replace(ESCAPE, "")
    carets = "".join(chr(ord(control) + 64) for control in controls)
    escaped = f"translate({doubled}, {literal(controls)}, {literal(carets)})"
    tame = f"if({sql} RLIKE r'[\\x00-\\x1F]', {escaped}, {sql})"
    return f"coalesce(concat('=', {tame}), {_NULL})"


def _of_bool(sql: str, _: T.DataType) -> str:
    return f"CASE WHEN {sql} THEN '?1' WHEN NOT {sql} THEN '?0' ELSE {_NULL} END"


def _of_int(sql: str, _: T.DataType) -> str:
    digits = f"CAST({sql} AS STRING)"
    return (
        f"CASE WHEN {sql} >= 0 THEN concat(char(96 + length({digits})), {digits})"
        f" WHEN {sql} < 0 THEN concat(char(92 - length({digits})), translate(substring({digits}, 2), {_DIGITS}))"
        f" ELSE {_NULL} END"
    )


def _of_decimal(sql: str, kind: T.DataType) -> str:
    precision, scale = (kind.precision, kind.scale) if isinstance(kind, T.DecimalType) else (0, 0)
    digits = _plain_digits(sql, scale)
    whole = digits if not scale else f"substring_index({digits}, '.', 1)"
    rising, falling = _letters(f"length({whole})", precision - scale)
    return (
        f"CASE WHEN startswith(CAST({sql} AS STRING), '-')"  # a comparison with 0 would round to fewer digits
        f" THEN concat('#', {falling}, translate({digits}, {_DIGITS}), '~')"
        f" WHEN {sql} IS NOT NULL THEN concat('#', {rising}, {digits})"
        f" ELSE {_NULL} END"
    )


def _plain_digits(sql: str, scale: int) -> str:
    """Return SQL for the digits of a decimal, without sign, trailing zeros and exponent."""
    # Not abs(): Spark rounds the result to 34 digits.
    digits = f"trim(LEADING '-' FROM CAST({sql} AS STRING))"
    if not scale:
        return digits
    if scale > _PLAIN_SCALE:
        digits_of_small = f"replace(substring_index({digits}, 'E', 1), '.', '')"
        zeros = f"repeat('0', CAST(substring_index({digits}, 'E-', -1) AS INT) - 1)"
        digits = f"if(contains({digits}, 'E'), concat('0.', {zeros}, {digits_of_small}), {digits})"
    return f"trim(TRAILING '.' FROM trim(TRAILING '0' FROM {digits}))"


def _letters(count: str, count_max: int) -> tuple[str, str]:
    rising, falling = f"char(96 + {count})", f"char(91 - {count})"
    if count_max <= _LETTERS:
        return rising, falling
    is_short = f"{count} <= {_LETTERS}"
    long_rising, long_falling = f"concat('z', char(71 + {count}))", f"concat('A', char(148 - {count}))"
    return f"if({is_short}, {rising}, {long_rising})", f"if({is_short}, {falling}, {long_falling})"


def _of_float(sql: str, _: T.DataType) -> str:
    number = f"CAST({sql} AS DOUBLE)"
    size = f"abs({number})"
    # The bits of the size are exact, because powers of two are.
    guess = f"CAST(floor(log2({size})) AS INT)"
    above, below = f"if({size} >= pow(2D, {guess} + 1), 1, 0)", f"if({size} < pow(2D, {guess}), 1, 0)"
    exponent = f"({guess} + {above} - {below})"
    mantissa = f"CAST(({size} / pow(2D, {exponent}) - 1D) * {_MANTISSA}D AS BIGINT)"
    bits = (
        f"CASE WHEN {size} < pow(2D, -1022) THEN CAST({size} * pow(2D, 537) * pow(2D, 537) AS BIGINT)"
        f" WHEN {size} = CAST('Infinity' AS DOUBLE) THEN 9218868437227405312L"
        f" ELSE CAST({exponent} + 1023 AS BIGINT) * {_MANTISSA}L + {mantissa} END"
    )
    return (
        f"CASE WHEN isnan({number}) THEN '~FFF8000000000000'"
        f" WHEN {number} >= 0 THEN concat('~', lpad(hex({bits} ^ CAST({_SIGN} AS BIGINT)), 16, '0'))"
        f" WHEN {number} < 0 THEN concat('~', lpad(hex(9223372036854775807L - {bits}), 16, '0'))"
        f" ELSE {_NULL} END"
    )


def _of_date(sql: str, _: T.DataType) -> str:
    return f"CASE WHEN {sql} BETWEEN {_DATES} THEN concat('@', CAST({sql} AS STRING)) WHEN {sql} IS NULL THEN {_NULL} END"


def _of_instant(sql: str, _: T.DataType) -> str:
    micros = f"unix_micros({sql})"
    text = f"CAST(timestampadd(MICROSECOND, {micros}, {_EPOCH}) AS STRING)"
    return (
        f"CASE WHEN {micros} BETWEEN {_MICROS} THEN concat('z', {text}) WHEN {sql} IS NULL THEN {_NULL} END"
    )


def _of_local_time(sql: str, _: T.DataType) -> str:
    years = "TIMESTAMP_NTZ'0001-01-01 00:00:00' AND TIMESTAMP_NTZ'9999-12-31 23:59:59.999999'"
    return f"CASE WHEN {sql} BETWEEN {years} THEN concat('t', CAST({sql} AS STRING)) WHEN {sql} IS NULL THEN {_NULL} END"


def _of_struct(sql: str, kind: T.DataType) -> str:
    fields = kind.fields if isinstance(kind, T.StructType) else []
    columns = [(f"{sql}.{quoted(field.name)}", field.dataType) for field in fields]
    parts = ", ".join(f"{literal(PART)}, {_part(*each)}" for each in columns)
    mark = literal(struct_mark([field.name for field in fields]))
    return f"if({sql} IS NULL, {_NULL}, concat({mark}, {parts}))"


_TYPES: Final[dict[type[T.DataType], tuple[Callable[[str, T.DataType], str], pa.DataType | None]]] = {
    T.StringType: (_of_text, pa.string()),
    T.LongType: (_of_int, pa.int64()),
    T.IntegerType: (_of_int, pa.int32()),
    T.ShortType: (_of_int, pa.int16()),
    T.ByteType: (_of_int, pa.int8()),
    T.BooleanType: (_of_bool, pa.bool_()),
    T.DecimalType: (_of_decimal, None),
    T.DoubleType: (_of_float, pa.float64()),
    T.FloatType: (_of_float, pa.float32()),
    T.DateType: (_of_date, pa.date32()),
    T.TimestampType: (_of_instant, pa.timestamp("us", "UTC")),
    T.TimestampNTZType: (_of_local_time, pa.timestamp("us")),
    T.BinaryType: (lambda sql, _: f"coalesce(concat('x', hex({sql})), {_NULL})", pa.binary()),
    T.StructType: (_of_struct, None),
    T.NullType: (lambda *_: _NULL, pa.null()),
}
"""The SQL of a value's text, and the type in Arrow where it does not depend on parameters."""


_CUTS_IN_TREE_MAX: Final = 128


def position_sql(key: str, lows: Sequence[str], positions: Sequence[int]) -> str:
    """Return SQL for the position of the interval that owns a key. ``lows`` are in key order; the first is ``""``."""
    cuts = lows[1:]
    # The number of cuts at or below the key, by bisection because there may be thousands of cuts.
    if len(cuts) <= _CUTS_IN_TREE_MAX:
        passed = _tree(key, cuts, 0)
    else:
        # Split the cuts from one literal if possible, because thousands of literals take long to plan.
        used = set().union(*cuts)
        free = next((character for character in map(chr, range(1, 32)) if character not in used), None)
        texts = f"array({', '.join(map(literal, cuts))})"
        if free is not None:
            texts = f"split({literal(free.join(cuts))}, {literal(free)}, -1)"
        steps = [1 << bit for bit in reversed(range(len(cuts).bit_length()))]
        reached = f"passed + step <= {len(cuts)} AND {texts}[passed + step - 1] <= {key}"
        passed = f"aggregate({_integers(steps)}, 0, (passed, step) -> if({reached}, passed + step, passed))"
    if list(positions) == list(range(positions[0], positions[0] + len(positions))):
        return f"{positions[0]} + {passed}"
    return f"{_integers(positions)}[{passed}]"


def _tree(key: str, cuts: Sequence[str], passed: int) -> str:
    if not cuts:
        return str(passed)
    half = len(cuts) // 2
    above = _tree(key, cuts[half + 1 :], passed + half + 1)
    return f"if({key} >= {literal(cuts[half])}, {above}, {_tree(key, cuts[:half], passed)})"


def _integers(numbers: Sequence[int]) -> str:
    return f"CAST(split('{','.join(map(str, numbers))}', ',') AS ARRAY<INT>)"
