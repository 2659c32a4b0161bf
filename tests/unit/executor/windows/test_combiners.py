"""Combine functions over elements, merged parts and retractions."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.executor.windows.combiners import (
    ArgMax,
    ArgMin,
    CombineFields,
    CombineFn,
    Count,
    CountDistinct,
    Last,
    Max,
    Mean,
    Min,
    Quantiles,
    StdDev,
    Sum,
    ToList,
    TopN,
    ToSet,
)
from millpond.executor.windows.sketches import ApproximateCountDistinct, ApproximateQuantiles
from millpond.executor.windows.strategy import described
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.value_text import decode_value, encode_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_NUMBERS = st.lists(st.integers(-100, 100), max_size=20)


def _itself(value: Any) -> Any:
    return value


def _thirds(value: int) -> int:
    return value % 3


def _quarters(value: int) -> int:
    return value % 4


_ALL = [
    Count(),
    Sum(),
    Mean(),
    Min(retractable=True),
    Max(retractable=True),
    TopN(3, retractable=True),
    CountDistinct(),
    Quantiles(at=(0, 0.5, 1)),
    Count(_itself),
    StdDev(),
    StdDev(population=True),
    ToSet(),
    Last(retractable=True),
    ArgMax(None, _thirds, retractable=True),
    ArgMin(None, _thirds, retractable=True),
]


def _over(combine: CombineFn, values: list[Any]) -> Any:
    accumulator = combine.create()
    for value in values:
        accumulator = combine.add(accumulator, value)
        accumulator = json.loads(json.dumps(accumulator))
    return accumulator


@pytest.mark.parametrize("combine", _ALL, ids=described)
@given(first=_NUMBERS, second=_NUMBERS)
def test_merged_parts_equal_one_accumulator(combine: CombineFn, first: list[int], second: list[int]) -> None:
    merged = combine.merge([_over(combine, first), _over(combine, second)])

    assert combine.extract(merged) == combine.extract(_over(combine, first + second))


@pytest.mark.parametrize("combine", _ALL, ids=described)
@given(stays=_NUMBERS, goes=st.integers(-100, 100))
def test_adding_and_retracting_an_element_changes_nothing(
    combine: CombineFn, stays: list[int], goes: int
) -> None:
    accumulator = combine.uncombine(_over(combine, [goes, *stays]), goes)
    for null in (None, pd.NA):
        if combine not in (Count(), *_ALL[-2:]):
            accumulator = combine.uncombine(combine.add(accumulator, null), null)

    assert combine.extract(accumulator) == combine.extract(_over(combine, stays))


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        (Count(), 4),
        (Sum(), 10),
        (Mean(), 2.5),
        (Min(), 1),
        (Max(), 4),
        (TopN(2), [4, 3]),
        (TopN(2, smallest=True), [1, 2]),
        (ToList(), [3, 1, 4, 2]),
        (CountDistinct(), 4),
        (Quantiles(at=(0.25, 0.5, 1)), [1, 2, 4]),
        (StdDev(), 1.2909944487358056),
        (StdDev(population=True), 1.118033988749895),
        (ToSet(), [1, 2, 3, 4]),
        (Last(), 2),
        (ArgMax(None, _thirds), 2),
        (ArgMin(None, _quarters), 4),
    ],
    ids=described,
)
def test_combiners_compute_the_value_in_their_name(combine: CombineFn, expected: Any) -> None:
    assert combine.extract(_over(combine, [3, 1, 4, 2])) == expected


@pytest.mark.parametrize("combine", [Max(), Min(), TopN(2), TopN(9, retractable=True)], ids=repr)
@pytest.mark.parametrize("missing", [[math.nan], [None], [Decimal("NaN")], [math.nan, None]])
def test_null_and_nan_have_no_place_in_an_order(combine: CombineFn, missing: list[Any]) -> None:
    numbers: list[Any] = [1.0, 4.0, 3.0]
    expected = combine.extract(_over(combine, numbers))

    for place in range(4):
        assert combine.extract(_over(combine, [*numbers[:place], *missing, *numbers[place:]])) == expected
    parts = [_over(combine, missing), _over(combine, numbers[:1]), _over(combine, numbers[1:])]
    assert combine.extract(combine.merge(parts)) == expected
    if combine.can_uncombine:
        assert combine.extract(combine.uncombine(_over(combine, numbers), missing[0])) == expected


def test_distinct_values_of_other_types_than_json_has_are_counted_apart() -> None:
    elements: list[Any] = [
        math.nan,
        math.nan,
        None,
        math.inf,
        Decimal("1.1"),
        "1.1",
        date(2026, 1, 31),
        "2026-01-31",
    ]

    assert CountDistinct().extract(_over(CountDistinct(), elements)) == 6


_NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)
_VALUES: list[tuple[str, Any]] = [
    ("one", 1),
    ("one", 1.0),
    ("one", Decimal("1.00")),
    ("one", np.int64(1)),
    ("true", True),
    ("text", "1"),
    ("zero", 0.0),
    ("zero", -0.0),
    ("zero", Decimal("-0.0")),
    ("half", 0.5),
    ("half", Decimal("0.50")),
    ("half", np.float32(0.5)),
    ("a tenth, as a float", 0.1),
    ("a tenth", Decimal("0.1")),
    ("a tenth", Decimal("0.10")),
    ("0.15, as a float", 0.15),
    ("0.15", Decimal("0.150")),
    ("2**70", 2**70),
    ("2**70", float(2**70)),
    ("2**70", Decimal(2**70)),
    ("1e22", 1e22),
    ("1e22", Decimal("1E+22")),
    ("large", Decimal("1E+99999")),
    ("small", Decimal("5E-99999")),
    ("NaN", math.nan),
    ("NaN", Decimal("NaN")),
    ("endless", math.inf),
    ("endless", Decimal("Infinity")),
    ("null", None),
    ("list", [1, {"a": 2.0, "b": math.nan}]),
    ("list", (1.0, {"b": Decimal("NaN"), "a": 2})),
    ("other list", [True, {"a": 2.0, "b": math.nan}]),
    ("map", {1: "x", (2, 3): "y"}),
    ("map", {(2.0, 3): "y", 1.0: "x"}),
    ("instant", _NEW_YEAR),
    ("instant", _NEW_YEAR.astimezone(timezone(timedelta(hours=-5)))),
    ("time without a zone", _NEW_YEAR.replace(tzinfo=None)),
    ("day", date(2026, 1, 1)),
    ("first", datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))),
]
"""Values, and what they are: those that are one have one name."""


@given(elements=st.lists(st.sampled_from(_VALUES)), goes=st.lists(st.sampled_from(_VALUES)), data=st.data())
def test_equal_values_are_one_in_any_cut(
    elements: list[tuple[str, Any]], goes: list[tuple[str, Any]], data: st.DataObject
) -> None:
    combine, values = CountDistinct(), [value for _, value in elements + goes]
    cut = data.draw(st.integers(0, len(values)))
    accumulator = combine.merge([_over(combine, values[:cut]), _over(combine, values[cut:])])
    for _, value in data.draw(st.permutations(goes)):
        accumulator = combine.uncombine(accumulator, value)

    assert combine.extract(accumulator) == len({name for name, _ in elements} - {"null"})


@pytest.mark.parametrize(
    ("stored", "distinct"),
    [
        ({"1": 2, "1.0": 1, "true": 1, '"1"': 1}, 3),
        ({"0.0": 1, "-0.0": 1, "1e22": 1, '  {"$value":"10000000000000000000000","$types":{"":"int"}}': 1}, 2),
        ({"0.5": 1, '  {"$value":"0.50","$types":{"":"decimal"}}': 1}, 1),
        ({f'  {{"$value":"{digits}","$types":{{"":"decimal"}}}}': 1 for digits in ("1.0", "1.00", "1.1")}, 2),
        ({'  {"$value":"1E+2","$types":{"":"decimal"}}': 1, "100": 1}, 1),
        ({f'  {{"$value":"{text}","$types":{{"":"{kind}"}}}}': 1 for text, kind in (("nan", "float"), ("NaN", "decimal"))}, 1),
        ({'{"a":1,"b":[2.0]}': 1, '{"a":1.0,"b":[2]}': 1, '{"a":true,"b":[2]}': 1}, 2),
        ({'  {"$value":"2026-01-01T01:00:00+01:00","$types":{"":"datetime"}}': 1, '  {"$value":"2026-01-01T00:00:00+00:00","$types":{"":"datetime"}}': 1, '  {"$value":"2026-01-01T00:00:00","$types":{"":"datetime"}}': 1}, 2),
        ({"1": 1, "1.0": -1}, 0),
    ],
    ids=str,
)  # fmt: skip
def test_distinct_values_of_earlier_versions_are_joined(stored: dict[str, int], distinct: int) -> None:
    combine = CountDistinct()
    added = combine.add_all(dict(stored), [7, 7.0])

    assert combine.extract(stored) == combine.extract(combine.merge([stored, {}])) == distinct
    assert combine.extract(added) == distinct + 1
    assert combine.extract(combine.uncombine(combine.uncombine(added, 7), 7)) == distinct


def test_values_of_earlier_versions_can_be_retracted() -> None:
    combine, accumulator = CountDistinct(), {"5": 1, "5.0": 1, "-0.0": 1}
    for value, distinct in ((5, 2), (0.0, 1), (Decimal(5), 0)):
        accumulator = combine.uncombine(accumulator, value)
        assert combine.extract(accumulator) == distinct


@pytest.mark.parametrize(
    ("elements", "goes", "rest"),
    [
        ([math.nan, 1.0], math.nan, [1.0]),
        ([1.0, Decimal("NaN")], Decimal("NaN"), [1.0]),
        ([math.nan, Decimal("NaN")], Decimal("NaN"), [math.nan]),
        ([True, 1], 1, [True]),
        ([1, True], True, [1]),
        ([1.0, 1], 1, [1.0]),
        ([0.0, -0.0], -0.0, [0.0]),
        ([Decimal("1.00"), Decimal("1.0")], Decimal("1.0"), [Decimal("1.00")]),
        ([1.0, 2], 1, [2]),
        ([[1, 2], 3], (1, 2), [3]),
        ([(1, 2), 3], [1, 2], [3]),
        ([{"a": True}, {"a": 1}], {"a": 1}, [{"a": True}]),
        ([{"a": math.nan, "b": 1}, 3], {"b": 1, "a": math.nan}, [3]),
        (["a", "b", "a"], "a", ["b", "a"]),
        ([5], np.int64(5), []),
        ([None, 1], None, [1]),
    ],
    ids=repr,
)
def test_retraction_finds_the_element_that_it_means(elements: list[Any], goes: Any, rest: list[Any]) -> None:
    """Decoded elements are other objects than the retraction, which matters for a NaN."""
    for combine in (ToList(), Quantiles()):
        stored = decode_value(encode_value(elements))
        assert repr(combine.uncombine(stored, goes)) == repr(rest)


@pytest.mark.parametrize(
    ("elements", "goes"),
    [([1, 0], True), ([True], 1), ([1.5], math.nan), ([{"a": True}], {"a": 1}), (["1"], 1), ([[1]], [2])],
)
def test_retraction_of_another_value_is_refused(elements: list[Any], goes: Any) -> None:
    assert ToList().uncombine_if_held(elements, goes) == (elements, False)
    with pytest.raises(InvalidError, match="matches no element"):
        ToList().uncombine(elements, goes)


@pytest.mark.parametrize("combine", [Quantiles(at=(0, 1)), ApproximateQuantiles(at=(0, 1))], ids=repr)
@pytest.mark.parametrize("missing", [[math.nan], [None], [Decimal("NaN")], [math.nan, None, Decimal("NaN")]])
@pytest.mark.parametrize("numbers", [[3.0, 1.0], [3, 1], [Decimal(3), Decimal(1)]])
def test_quantiles_leave_out_null_and_nan(combine: CombineFn, missing: list[Any], numbers: list[Any]) -> None:
    for elements in ([*missing, *numbers], [*numbers, *missing], [numbers[0], *missing, numbers[1]]):
        assert combine.extract(combine.add_all(combine.create(), elements)) == [1, 3]
    assert combine.extract(combine.add_all(combine.create(), missing)) is None


def test_lists_with_a_null_or_nan_have_no_place_in_an_order() -> None:
    """They are what ``top`` ranks: a value and its key."""
    best, worst = TopN(2, retractable=True), [math.nan, "a"]
    accumulator = best.add_all([], [[1.0, "b"], worst, [3.0, "c"], [None, "d"], [2.0, "e"]])

    assert best.extract(accumulator) == [[3.0, "c"], [2.0, "e"]]
    assert best.uncombine(accumulator, worst) == accumulator


_NULLS = st.sampled_from([None, None, pd.NA, pd.NaT, np.datetime64("NaT"), np.timedelta64("NaT")])
_LARGE = 2**63 - 1
_NOON = datetime.fromisoformat("2026-01-01T12:00")
_KINDS: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "whole numbers": (st.integers(-3, 3) | st.integers(-_LARGE - 1, _LARGE), pa.int64()),
    "floats": (st.floats() | st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf]), pa.float64()),
    "decimals": (st.decimals(-99, 99, places=2) | st.decimals(-(10**35), 10**35, places=2), pa.decimal128(38, 2)),
    "text": (st.text("aä\U0001f600\uffff", max_size=3), pa.string()),
    "bytes": (st.binary(max_size=2), pa.binary()),
    "booleans": (st.booleans(), pa.bool_()),
    "dates": (st.dates(), pa.date32()),
    "times": (st.times(), pa.time64("us")),
    "times without a zone": (st.datetimes(), pa.timestamp("us")),
    "instants": (st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=2))]), min_value=datetime.fromisoformat("0002-01-01"), max_value=datetime.fromisoformat("9998-01-01")), pa.timestamp("us", tz="UTC")),
    "durations": (st.timedeltas(timedelta(-9), timedelta(9)), pa.duration("us")),
}  # fmt: skip


def _known(value: Any) -> Any:
    """Return the value, or null for any form of a missing one."""
    return (
        None
        if value is None or value is pd.NA or type(value) in {np.datetime64, np.timedelta64, type(pd.NaT)}
        else value
    )


def _stored(accumulator: Any) -> Any:
    return decode_value(encode_value(accumulator))


def _in_random_cuts(data: st.DataObject, combine: CombineFn, elements: list[Any], *, in_order: bool) -> Any:
    """Return the value over parts, of which each is stored after each of its pieces, and which merge in any order."""

    def pieces(of: list[Any]) -> list[list[Any]]:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(of)), max_size=2)))
        return [of[start:end] for start, end in zip([0, *cuts], [*cuts, len(of)], strict=True)]

    accumulators = []
    for part in pieces(elements):
        accumulator = combine.create()
        for piece in pieces(part):
            accumulator = _stored(combine.add_all(accumulator, piece))
        accumulators.append(accumulator)
    merged = combine.merge(accumulators if in_order else data.draw(st.permutations(accumulators)))
    return _stored(combine.extract(_stored(merged)))


def _is_same(shown: Any, expected: Any) -> bool:
    if isinstance(shown, list) and isinstance(expected, list):
        return len(shown) == len(expected) and all(map(_is_same, shown, expected))
    if isinstance(shown, float) and isinstance(expected, float) and math.isnan(shown):
        return math.isnan(expected)
    return bool(shown == expected)


@pytest.fixture(scope="module")
def duck() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("set TimeZone = 'UTC'; set threads = 1")
        yield connection


def _figures(duck: duckdb.DuckDBPyConnection, columns: dict[str, pa.Array], *figures: str) -> tuple[Any, ...]:
    duck.register("t", pa.table(columns))
    (row,) = duck.execute(f"select {', '.join(figures)} from t").fetchall()
    return tuple(row)


@pytest.mark.parametrize("kind", _KINDS)
@given(data=st.data())
@settings(max_examples=settings().max_examples // 2)
def test_combiners_give_what_sql_gives(
    duck: duckdb.DuckDBPyConnection, kind: str, data: st.DataObject
) -> None:
    values, arrow_type = _KINDS[kind]
    row = st.fixed_dictionaries({"x": values | _NULLS, "y": st.none() | st.integers(0, 3)})
    rows = data.draw(st.lists(row, max_size=9))
    nan = {"nan_is_greatest": kind == "floats" and data.draw(st.booleans())}
    ranks = "isfinite(x) or isinf(x)" if kind == "floats" and not nan["nan_is_greatest"] else "x is not null"
    wanted: dict[str, tuple[CombineFn, str]] = {
        "rows": (Count(), "count(*)"),
        "values": (Count("x"), "count(x)"),
        "distinct": (CountDistinct("x"), "count(distinct x)"),
        "set": (ToSet("x"), "coalesce(list_sort(list(distinct x) filter (x is not null)), [])"),
        "max": (Max("x", **nan), f"max(x) filter ({ranks})"),
        "min": (Min("x", **nan), f"min(x) filter ({ranks})"),
        "top": (TopN(3, "x", **nan), f"coalesce(max(x, 3) filter ({ranks}), [])"),
        "all": (TopN(9, "x", smallest=True, retractable=True, **nan), f"coalesce(list(x order by x) filter ({ranks}), [])"),
        "argmax": (ArgMax("y", "x", **nan), f"first(y order by x desc, y nulls last) filter ({ranks})"),
        "argmin": (ArgMin("y", by="x", retractable=True, **nan), f"first(y order by x, y nulls last) filter ({ranks})"),
        "middle": (Quantiles("x", (0, 0.4, 1), **nan), f"quantile_disc(x, [0, 0.4, 1] order by x) filter ({ranks})"),
    }  # fmt: skip
    by_arrival: dict[str, tuple[CombineFn, str]] = {
        "last": (Last("x"), "last(x order by i) filter (x is not null)"),
        "list": (ToList("x"), "coalesce(list(x order by i), [])"),
    }
    shown: dict[str, Any] = {}
    for combiners in (wanted, by_arrival):
        combine = CombineFields({name: one for name, (one, _) in combiners.items()})
        shown |= _in_random_cuts(data, combine, rows, in_order=combiners is by_arrival)
    columns = {
        "i": pa.array(range(len(rows)), pa.int64()),
        "x": pa.array([_known(one["x"]) for one in rows], arrow_type),
        "y": pa.array([one["y"] for one in rows], pa.int64()),
    }
    expected = _figures(duck, columns, *(sql for _, sql in [*wanted.values(), *by_arrival.values()]))
    for name, wants in zip(shown, expected, strict=True):
        assert _is_same(shown[name], wants), (name, rows, shown[name], wants)


_SMALL: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "whole numbers": _KINDS["whole numbers"],
    "decimals": (st.decimals(-(10**9), 10**9, places=2), pa.decimal128(20, 2)),
    "floats": (st.floats(-1e3, 1e3), pa.float64()),
}


@pytest.mark.parametrize("kind", _SMALL)
@given(data=st.data())
def test_sums_means_and_deviations_are_those_of_sql(
    duck: duckdb.DuckDBPyConnection, kind: str, data: st.DataObject
) -> None:
    values, arrow_type = _SMALL[kind]
    numbers = data.draw(st.lists(values | _NULLS, max_size=9).filter(bool))
    known = list(map(_known, numbers))
    exact, *rounded = _figures(
        duck, {"x": pa.array(known, arrow_type)}, "sum(x)", "avg(x)", "stddev(x)", "stddev_pop(x)"
    )
    combine = CombineFields(
        {"sum": Sum(), "mean": Mean(), "sample": StdDev(), "population": StdDev(population=True)}
    )
    total, *others = _in_random_cuts(data, combine, numbers, in_order=False).values()

    # DuckDB adds up floats with rounding.
    assert total == (pytest.approx(exact, abs=1e-9) if kind == "floats" else exact)
    size = max((abs(float(number)) for number in known if number is not None), default=0)
    for shown, expected in zip(others, rounded, strict=True):
        assert (shown is None) == (expected is None)
        assert shown is None or float(shown) == pytest.approx(expected, rel=1e-9, abs=1e-7 * size + 1e-4)


_ANY_NUMBER = (
    st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(0.1, 0.2)
    | st.integers(-(2**70), 2**70)
    | st.decimals(allow_nan=False, allow_infinity=False, places=5)
    | st.sampled_from([5e-324, 1.7976931348623157e308, -1.7976931348623157e308])
)


def _or_infinity(deviation: Callable[[list[Fraction]], Any], numbers: list[Fraction]) -> Any:
    """The deviation of two opposite numbers can lie beyond the floats, where Python's module gives up."""
    try:
        return deviation(numbers)
    except OverflowError:
        return math.inf


@given(numbers=st.lists(_ANY_NUMBER, min_size=2, max_size=8), goes=st.lists(_ANY_NUMBER), data=st.data())
def test_deviation_is_rounded_once_in_any_cut(
    numbers: list[Any], goes: list[Any], data: st.DataObject
) -> None:
    fractions = list(map(Fraction, numbers))
    for combine, expected in (
        (StdDev(), _or_infinity(statistics.stdev, fractions)),
        (StdDev(population=True), _or_infinity(statistics.pstdev, fractions)),
    ):
        shuffled = data.draw(st.permutations([*numbers, *goes]))
        assert _in_random_cuts(data, combine, numbers, in_order=False) == expected
        accumulator = combine.add_all(combine.create(), shuffled)
        for number in goes:
            accumulator = combine.uncombine(accumulator, number)
        assert combine.extract(accumulator) == expected


def test_deviation_of_infinities_and_nan_is_nan_until_they_are_retracted() -> None:
    combine = StdDev()
    for odd in (math.nan, math.inf, -math.inf, Decimal("NaN"), Decimal("Infinity")):
        accumulator = combine.add_all(combine.create(), [1, odd, 3])

        assert math.isnan(combine.extract(accumulator) or 0)
        assert combine.extract(combine.uncombine(accumulator, odd)) == math.sqrt(2)


_OF_NULLS: list[tuple[CombineFn, Any]] = [
    (Count(), 3),
    (Count("x"), 0),
    (Sum("x"), None),
    (Mean("x"), None),
    (StdDev("x"), None),
    (Min("x"), None),
    (Max("x"), None),
    (TopN(2, "x"), []),
    (Last("x"), None),
    (ArgMax("y", "x"), None),
    (CountDistinct("x"), 0),
    (ApproximateCountDistinct("x"), 0),
    (ToSet("x"), []),
    (Quantiles("x"), None),
    (ApproximateQuantiles("x"), None),
    (ToList("x"), [None, None, None]),
]


@pytest.mark.parametrize(("combine", "expected"), _OF_NULLS, ids=repr)
def test_window_of_nulls_alone_shows_what_sql_shows(combine: CombineFn, expected: Any) -> None:
    rows: list[Any] = [{"x": null, "y": 1} for null in (None, pd.NaT, pd.NA)]
    for cut in range(4):
        parts = [_stored(combine.add_all(combine.create(), part)) for part in (rows[:cut], rows[cut:])]
        assert _stored(combine.extract(combine.merge(parts))) == expected
    if combine != Count():
        with pytest.raises(InvalidError, match="no such field"):
            combine.add(combine.create(), {"z": 1})


@given(numbers=st.lists(st.sampled_from([None, 0, 0.0, 5, -5, Decimal("0.0")]), max_size=6), data=st.data())
def test_sum_is_null_only_of_nulls_alone(numbers: list[Any], data: st.DataObject) -> None:
    known = [number for number in numbers if number is not None]
    shown = _in_random_cuts(data, Sum(), numbers, in_order=False)

    assert shown == (sum(map(Fraction, known)) if known or not numbers else None)
    assert type(shown) is not bool


def test_nulls_that_earlier_versions_counted_are_not_distinct_values() -> None:
    assert CountDistinct().extract({"null": 2, "1": 1}) == 1


@pytest.mark.parametrize(
    ("elements", "shown"),
    [
        ([1.0, 1, Decimal("1.00")], "[1]"),
        ([Decimal("5.00"), Decimal("5.000")], "[Decimal('5.00')]"),
        ([2, True, 1, math.nan, math.nan], "[1, True, 2, nan]"),
        (["b", "a", 3, None], "[3, 'a', 'b']"),
        ([{"a": 1}, {"a": 1.0}, {"a": 0}], "[{'a': 0}, {'a': 1}]"),
    ],
    ids=repr,
)
def test_set_has_equal_values_once_in_an_order_of_its_own(elements: list[Any], shown: str) -> None:
    for order in (elements, elements[::-1]):
        assert repr(ToSet().extract(_stored(_over(ToSet(), order)))) == shown


def test_set_loses_a_value_with_its_last_retraction() -> None:
    combine = ToSet()
    accumulator = combine.uncombine(combine.add_all(combine.create(), [1, 1.0, 2.0]), 1)

    assert repr(combine.extract(accumulator)) == "[1.0, 2.0]"
    assert combine.extract(combine.uncombine(accumulator, 1)) == [2.0]
    assert combine.extract(combine.add(combine.uncombine(combine.create(), 7), 7.0)) == []


@pytest.mark.parametrize(
    "tied",
    [
        [("x", 3), ("x", 12), ("x", None), ("x", "3")],
        [("x", "b"), ("x", "c"), ("x", None)],
        [(1, 2.5), (1.0, Decimal("2.6")), (Decimal(1), math.nan)],
    ],
    ids=repr,
)
def test_tie_goes_to_the_least_value_in_any_order(tied: Sequence[tuple[Any, Any]]) -> None:
    for elements in (tied, tied[::-1]):
        rows = [{"by": by, "of": of} for by, of in elements]
        for combine in (ArgMax("of", by="by"), ArgMin("of", by="by", retractable=True)):
            parts = [_stored(combine.add(combine.create(), row)) for row in rows]
            together = combine.add_all(combine.create(), rows)
            assert combine.extract(combine.merge(parts)) == combine.extract(together) == tied[0][1]


def test_retracted_maximum_uncovers_the_one_before() -> None:
    rows = [{"by": by, "of": of} for by, of in ((1, "a"), (3, "b"), (2, "c"), (None, "d"))]
    combine = ArgMax("of", "by", retractable=True)
    accumulator = _over(combine, rows)

    assert combine.extract(combine.uncombine(combine.uncombine(accumulator, rows[3]), rows[1])) == "c"
    assert combine.uncombine_if_held(accumulator, {"by": 9, "of": "e"}) == (accumulator, False)
    with pytest.raises(InvalidError, match="retractable"):
        ArgMax("of", "by").uncombine([[1, "a"]], rows[0])


@pytest.mark.parametrize("combine", [Max(), Quantiles(at=(1,)), TopN(1), ToSet(), Last()], ids=repr)
def test_values_of_numpy_and_pandas_are_as_those_of_python(combine: CombineFn) -> None:
    """Elements of a turn are not stored yet, and meet those that were."""
    odd: list[Any] = [np.datetime64("2026-01-01T11:00"), pd.NaT, pd.Timestamp("2026-01-01T10:00"), _NOON]
    shown = combine.extract(combine.add_all(combine.add_all(combine.create(), odd[:2]), odd[2:]))

    assert (shown[-1] if isinstance(shown, list) else shown) == _NOON


@pytest.mark.parametrize(
    ("combine", "elements"),
    [
        (Max(), [1, "a"]),
        (Min(), [_NOON.date(), _NOON]),
        (TopN(3), [_NOON, _NOON.replace(tzinfo=UTC)]),
        (Quantiles(), [_NOON, None, _NOON.replace(tzinfo=UTC)]),
        (Quantiles(), [1, "a"]),
        (Quantiles(), [{"a": 1}]),
        (Max(), [{"a": 1}]),
        (ArgMax("y", "x"), [{"x": {"a": 1}, "y": 1}]),
        (ArgMax("y", "x"), [{"x": b"1", "y": 1}, {"x": "1", "y": 1}]),
        (Sum(), ["1"]),
        (Mean(), [_NOON]),
        (StdDev(), ["1"]),
        (StdDev(), [timedelta(1)]),
        (ApproximateQuantiles(), ["1"]),
        (ToSet(), [1j]),
        (Max(), [1j]),
    ],
    ids=repr,
)
def test_values_for_which_a_combiner_means_nothing_are_refused(combine: CombineFn, elements: Any) -> None:
    with pytest.raises(InvalidError):
        combine.add_all(combine.create(), elements)
    *first, last = elements
    accumulator = combine.create()
    for element in first:
        accumulator = combine.add(accumulator, element)
    with pytest.raises(InvalidError):
        combine.add(accumulator, last)


def test_combiner_of_a_field_reads_that_field_only() -> None:
    assert Sum("score").add(0, {"score": 7, "team": "red"}) == 7
    assert Max(lambda value: value["score"]).extract([7]) == 7


def test_sum_accepts_booleans_and_numpy_numbers() -> None:
    numbers = [True, False, np.int64(3), np.float64(0.5), 2]

    assert Sum().extract(_over(Sum(), numbers)) == 6.5
    assert Sum().extract(Sum().uncombine(_over(Sum(), numbers), np.float64(0.5))) == 6
    assert Sum().extract(Sum().add_all(0, [True, 2, 3.5])) == 6.5


@pytest.mark.parametrize("combine", [Sum(), Mean()])
def test_sum_and_mean_leave_out_null(combine: CombineFn) -> None:
    accumulator = _over(combine, [1, None, 3])

    assert combine.extract(accumulator) == combine.extract(_over(combine, [1, 3]))
    assert combine.uncombine(accumulator, None) == accumulator


def test_statistics_of_no_elements_are_null() -> None:
    assert [combiner.extract(combiner.create()) for combiner in (Mean(), Min(), Max(), Quantiles())] == [
        None
    ] * 4


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: Sum("score").add(0, {"team": "red"}),
        lambda: Sum(of=5),  # type: ignore[arg-type]
        lambda: TopN(0),
        lambda: Quantiles(at=(2,)),
        lambda: Max().uncombine([3], 3),
        lambda: ToList().uncombine([3], 4),
        lambda: Count(of=5),  # type: ignore[arg-type]
        lambda: StdDev(population="no"),  # type: ignore[arg-type]
        lambda: Last(retractable=1),  # type: ignore[arg-type]
        lambda: ArgMax("a", 3),  # type: ignore[arg-type]
        lambda: Max(nan_is_greatest=1),  # type: ignore[arg-type]
        lambda: Sum().add_all(0, [1, "2"]),
        lambda: Mean().add([0, 0], "0.1"),
    ],
)
def test_invalid_arguments_and_values_are_refused(attempt) -> None:
    with pytest.raises(InvalidError):
        attempt()
