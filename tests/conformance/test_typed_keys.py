"""Keys of any type and number of columns on both runners: rows, views, dead letters and refusals."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from itertools import count
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.statestore.view import connect
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays
from tests.fixtures.typed_keys import KEY_TYPES, key_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.both_runners import Play

pytestmark = pytest.mark.timeout(300)

_STRUCT = pa.struct([("a", pa.string()), ("n", pa.int64())])
# Spark reads times without a zone in an Arrow table in its session's zone.
_KINDS = [kind for kind in (*KEY_TYPES, _STRUCT) if kind != pa.timestamp("us")]
_CARDS = pa.schema([("country", pa.string()), ("card", pa.int64()), ("day", pa.date32()), ("t", pa.int64())])
_RUNS = count()
_DAY = dt.date(2026, 11, 23)


class Tally(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set((context.state.get() or 0) + 1)


class Count(Tally):
    """Counts the records of a key, and produces to the key made of the last value alone."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        super().process_record(context, record)
        context.produce("told", {"of": list(map(str, context.key_values))}, key=(context.key_values[-1],))


class Listen(mp.Computation):
    """Keeps the last production to its key."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set(record.value["of"])


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def _pipeline(key: Any, *, own: Any = None) -> mp.Pipeline:
    pipeline = mp.Pipeline("keys")
    rows = pipeline.inject("rows", key=key, at="t", at_unit="us", watermark=mp.ManualWatermark())
    told = rows.apply(Count(), name="count", produces="told", key=own)
    told.apply(Listen(), name="listen")
    return pipeline


def _cards(*rows: tuple[Any, ...]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(_CARDS.names, (*row, 7), strict=True)) for row in rows], _CARDS)


def _counts(play: Play, computation: str = "count") -> dict[str, Any]:
    return {key: orjson.loads(state) for key, state in play.states(computation).items()}


@given(rows=st.lists(st.tuples(*map(key_values, _KINDS)), min_size=2, max_size=20))
@settings(max_examples=3, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
def test_runners_have_the_rows_of_the_tuples(play: Callable[..., Play], rows: list[tuple[Any, ...]]) -> None:
    names = [f"c{place}" for place in range(len(_KINDS))]
    doubled = [*rows, *rows[::2]]
    columns = [pa.array(cells, kind) for cells, kind in zip(zip(*doubled, strict=True), _KINDS, strict=True)]
    table = pa.table([*columns, pa.array([7] * len(doubled))], names=[*names, "t"])
    running = play(lambda: _pipeline(names), within=f"run{next(_RUNS)}")

    running.inject("rows", table)
    running.settle()

    assert _counts(running) == Counter(map(mp.encode_key, doubled))
    assert _counts(running, "listen").keys() == {mp.encode_key(row[-1:]) for row in doubled}
    shown = running.store.rows_view("count").to_arrow()
    assert [
        mp.encode_key(cells)
        for cells in zip(*(shown.column(name).to_pylist() for name in names), strict=True)
    ] == (shown.column("key").to_pylist())
    running.stop()


def test_views_show_typed_columns(play: Callable[..., Play]) -> None:
    """Rows are found by the columns' values, in Arrow and SQL."""
    running = play(lambda: _pipeline(["country", "card", "day"]))
    running.inject(
        "rows", _cards(("no", 4711, _DAY), ("no", -1, None), (None, 4711, _DAY), ("no", 4711, _DAY))
    )

    view = running.store.rows_view("count")
    shown = view.to_arrow()

    assert shown.schema.names[:4] == ["key", "country", "card", "day"]
    assert [shown.schema.field(name).type for name in ("country", "card", "day")] == _CARDS.types[:3]
    assert shown.select(["country", "card", "day", "state"]).to_pylist() == [
        {"country": None, "card": 4711, "day": _DAY, "state": "1"},
        {"country": "no", "card": -1, "day": None, "state": "1"},
        {"country": "no", "card": 4711, "day": _DAY, "state": "2"},
    ]
    assert view.to_arrow([("no", 4711, _DAY)]).column("state").to_pylist() == ["2"]
    assert view.to_arrow([("no", "4711", "2026-11-23")]).num_rows == 1
    assert view.to_arrow([("no", 4711, None)]).num_rows == 0
    with connect(running.store.committer.snapshot, running.store.objects) as sql:
        found = sql.execute(
            "select country, card + 1, state from count where day is not null order by key"
        ).fetchall()
        assert found == [(None, 4712, "1"), ("no", 4712, "2")]


def test_single_column_key(play: Callable[..., Play]) -> None:
    """A text column is the key itself, another type is a typed key, and null is a dead letter."""
    texts, numbers = (play(lambda key=key: _pipeline(key), within=key) for key in ("country", "card"))
    for running in (texts, numbers):
        running.inject("rows", _cards(("no", 4711, _DAY), (None, None, _DAY)))
        letters = [orjson.loads(state) for state in running.states("dead_letters").values()]
        assert [letter["error"] for letter in letters] == ["the key is null"]

    assert _counts(texts) == {"no": 1}
    assert "country" not in texts.store.rows_view("count").to_arrow().schema.names
    assert _counts(numbers) == {mp.encode_key((4711,)): 1}
    assert numbers.store.rows_view("count").to_arrow().column("card").to_pylist() == [4711]


def test_text_that_begins_like_a_typed_key_is_a_key_of_its_own(play: Callable[..., Play]) -> None:
    """Each of these texts would be another key, or none, as the text of a typed key."""
    texts = ["no", "\td4711", "\tname", "\t=no\td4711", "\t!"]
    running = play(lambda: _pipeline("country"))
    running.inject("rows", _cards(*((text, 1, _DAY) for text in texts)))
    running.settle()

    assert {mp.decode_key(key): state for key, state in _counts(running).items()} == {
        (text,): 1 for text in texts
    }
    assert {tuple(orjson.loads(state)) for state in running.states("listen").values()} == {
        (text,) for text in texts
    }
    # A view takes the text of a key: of the others these are typed keys.
    found = running.store.rows_view("count").to_arrow(texts)
    assert [mp.decode_key(key) for key in found.column("key").to_pylist()] == [("\tname",), ("no",)]


def test_consumer_names_its_own_columns(play: Callable[..., Play]) -> None:
    """Two consumers of a stream may have keys of different kinds."""

    def both() -> mp.Pipeline:
        pipeline = _pipeline("country", own=["day"])
        pipeline.stream("rows").apply(Tally(), name="plain")
        return pipeline

    running = play(both)
    running.inject("rows", _cards(("no", 1, _DAY), ("se", 2, _DAY)))

    assert _counts(running) == {mp.encode_key((_DAY,)): 2}
    assert _counts(running, "plain") == {"no": 1, "se": 1}


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ("country", ["country"], "have plain text as keys"),
        (["country"], "country", "have typed keys, and its key is text now"),
        (["country"], ["card"], "a column of the computation's key has another type now"),
        (["country"], ["country", "card"], "made of another number of columns"),
    ],
)
def test_changed_kind_of_key_is_refused(play: Callable[..., Play], first: Any, then: Any, says: str) -> None:
    """Existing rows would not be found; nothing is written."""
    running = play(lambda: _pipeline(first))
    running.inject("rows", _cards(("no", 4711, _DAY)))
    before = running.states("count")
    running.make = lambda: _pipeline(then)
    running.restart()

    with pytest.raises(mp.InvalidError, match=f"{says}.*drop= this one.*computation=`count`"):
        running.inject("rows", _cards(("no", 4711, _DAY)))

    assert running.states("count") == before


def test_wider_types_are_the_same_key(play: Callable[..., Play]) -> None:
    """Views show the new name and type."""
    running = play(lambda: _pipeline(["card"]))
    running.inject("rows", _cards(("no", 7, _DAY)).set_column(1, "card", pa.array([7], pa.int32())))
    running.make = lambda: _pipeline(["number"])
    running.restart()
    running.inject("rows", _cards(("no", 7, _DAY)).rename_columns(["country", "number", "day", "t"]))

    shown = running.store.rows_view("count").to_arrow()
    assert shown.select(["number", "state"]).to_pylist() == [{"number": 7, "state": "2"}]
    assert shown.schema.field("number").type == pa.int64()


def test_key_columns_named_like_view_columns_are_renamed(tmp_path: Path) -> None:
    """The comparison ignores case."""
    with plays(tmp_path, ManualClock) as start:
        running = start(lambda: _pipeline(["State", "key", "key_key"]))
        running.inject("rows", [{"State": 1, "key": 2, "key_key": 3, "t": 7}])

        names = running.store.rows_view("count").to_arrow().schema.names[:5]
        assert names == ["key", "key_State", "key_key", "key_key_key", "state"]
        with connect(running.store.committer.snapshot, running.store.objects) as sql:
            assert sql.execute('select "key_State", key_key, key_key_key, state from count').fetchall() == [
                (1, 2, 3, "1")
            ]


def test_renamed_computation_keeps_its_columns(tmp_path: Path) -> None:
    def renamed() -> mp.Pipeline:
        pipeline = mp.Pipeline("keys", drop=["listen"])
        rows = pipeline.inject("rows", key=["card"], at="t", at_unit="us", watermark=mp.ManualWatermark())
        rows.apply(Tally(), name="tally", renamed_from="count")
        return pipeline

    with plays(tmp_path, ManualClock) as start:
        running = start(lambda: _pipeline(["card"]))
        running.inject("rows", [{"card": 7, "t": 7}])
        running.make = renamed
        running.restart()

        assert running.store.rows_view("tally").to_arrow().select(["card", "state"]).to_pylist() == [
            {"card": 7, "state": "1"}
        ]


def test_null_column_is_text_until_its_first_value(tmp_path: Path) -> None:
    with plays(tmp_path, ManualClock) as start:
        running = start(lambda: _pipeline(["country", "card"]))
        shown = []
        for card in (None, 7):
            running.inject("rows", [{"country": "no", "card": card, "t": 7}])
            table = running.store.rows_view("count").to_arrow()
            shown.append((table.schema.field("card").type, table.column("card").to_pylist()))

        assert shown == [(pa.string(), [None]), (pa.int64(), [None, 7])]


def test_mappings_have_the_keys_of_a_table(tmp_path: Path) -> None:
    rows = [
        {"c": None, "d": Decimal("1.50"), "s": {"n": 1}, "t": 7},
        {"c": "no", "d": Decimal(2), "s": None, "t": 7},
    ]
    with plays(tmp_path, ManualClock) as start:
        given = [start(lambda: _pipeline(["c", "d", "s"]), within=name) for name in ("mappings", "table")]
        given[0].inject("rows", rows)
        given[1].inject("rows", pa.Table.from_pylist(rows))

        assert _counts(given[0]) == _counts(given[1])
        shown = given[0].store.rows_view("count").to_arrow()
        assert shown.select(["c", "d", "s"]).to_pylist() == [
            {name: row[name] for name in "cds"} for row in rows
        ]
