"""Dead letters on both runners: their contents, and the share of them that stops a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

import millpond as mp
from millpond.statestore.rows.value_text import decode_value
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, Play, SparkPlay, plays

Open = Callable[[Callable[[], Any]], Play]


class Checked(mp.Computation):
    """Counts its records, and raises for records marked bad."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        if record.value["bad"]:
            raise ValueError(f"number {record.value['n']} is bad")
        context.state.set(context.state.get(0) + 1)


class Lost(mp.Computation):
    """Produces to a stream that it does not declare."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Misspell the stream."""
        context.produce("cuonts", record.value["n"])


def pipeline(computation: mp.Computation | None = None, **options: Any) -> Callable[[], mp.Pipeline]:
    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="t", id="n", **options)
        stream.apply(computation or Checked(), name="checked", produces="counts")
        return pipeline

    return make


def rows(count: int, *, bad: int, first: int = 0) -> list[dict[str, Any]]:
    at = datetime(2013, 2, 8, 10, tzinfo=UTC)
    return [{"k": f"k{n % 7}", "t": at, "n": first + n, "bad": n < bad} for n in range(count)]


@pytest.fixture(params=[LocalPlay, pytest.param(SparkPlay, marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    spark = request.getfixturevalue("spark") if request.param is SparkPlay else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def test_superstep_of_only_dead_letters_stops_the_run(play: Open) -> None:
    """Nothing is committed, so the corrected program gets all of it."""
    pond = play(pipeline())
    with pytest.raises(mp.InvalidError, match=r"too many records.*`checked`.*`5`.*number \d is bad"):
        pond.inject("in", rows(5, bad=5))

    assert "number" in str(pond.run.summary().error)
    assert pond.states("dead_letters") == {}
    pond.restart()
    pond.inject("in", rows(5, bad=0))
    assert sum(map(int, pond.states("checked").values())) == 5


def test_share_of_dead_letters_stops_the_run(play: Open) -> None:
    """Of 120 records 24 may fail, but not 25."""
    pond = play(pipeline())
    pond.inject("in", rows(120, bad=24))
    with pytest.raises(mp.InvalidError, match="too many records"):
        pond.inject("in", rows(120, bad=25, first=1_000))

    assert len(pond.states("dead_letters")) == 24


def test_few_records_are_judged_together(play: Open, caplog: pytest.LogCaptureFixture) -> None:
    """Small supersteps are added up to a hundred records; a run's first dead letter is a warning."""
    pond = play(pipeline())
    caplog.set_level(logging.WARNING, "millpond")
    for number in range(3):
        pond.inject("in", rows(30, bad=9, first=100 * number))
    with pytest.raises(mp.InvalidError, match=r"too many records.*dead_letters=`36` records=`120`"):
        pond.inject("in", rows(30, bad=9, first=300))

    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "became a dead letter computation=`checked`" in warning
    assert "is bad" in warning
    assert pond.run.summary().run.by_computation == {"checked": {"dead_letters": 27}}


def test_lone_bad_record_does_not_stop_the_run(play: Open) -> None:
    """On a quiet stream each record has a separate superstep."""
    pond = play(pipeline())
    pond.inject("in", rows(1, bad=1))
    pond.inject("in", rows(1, bad=0, first=1))

    assert pond.run.summary().run.dead_letters == 1
    assert pond.run.summary().error is None


def test_undeclared_stream_stops_the_run(play: Open) -> None:
    """The mistake is the program's, not the record's; nothing is committed."""
    pond = play(pipeline(Lost()))
    with pytest.raises(mp.InvalidError, match=r"does not declare this stream.*`checked`.*`cuonts`.*counts"):
        pond.inject("in", rows(1, bad=0))

    assert pond.states("dead_letters") == {}


def test_letter_has_id_time_attempt_and_typed_value(play: Open) -> None:
    pond = play(pipeline())
    given = rows(3, bad=1)
    pond.inject("in", [*given, {**given[0], "k": None, "n": 3}])
    failed, unreadable = sorted(
        (orjson.loads(state) for state in pond.states("dead_letters").values()),
        key=lambda letter: letter["id"],
    )

    assert (failed["id"], failed["attempt"], failed["key"]) == ("0", 3, "k0")
    assert (unreadable["id"], unreadable["attempt"], unreadable["key"]) == ("3", 1, None)
    for letter in (failed, unreadable):
        assert letter["at"] == "2013-02-08T10:00:00+00:00"
        assert datetime.fromisoformat(letter["failed_at"]).timestamp() * 1e6 == pytest.approx(
            pond.clock.now_us()
        )
        assert orjson.loads(letter["value"])["t"] == "2013-02-08T10:00:00+00:00"
    assert mp.letter_value(failed)["t"] == given[0]["t"]
    assert mp.letter_value(unreadable)["k"] is None


def test_milliseconds_are_not_taken_for_microseconds(play: Open) -> None:
    given = [{**row, "t": 1_700_000_000_000 + row["n"]} for row in rows(10, bad=0)]
    pond = play(pipeline())
    with pytest.raises(mp.InvalidError, match=r'too many records.*date in milliseconds: say at_unit="ms"'):
        pond.inject("in", given)

    pond.make = pipeline(at_unit="ms")
    pond.restart()
    pond.inject("in", given)
    assert pond.watermark("checked") == 1_700_000_000_009_000
    assert pond.states("dead_letters") == {}


def test_times_without_a_zone_need_the_injectors_zone(play: Open) -> None:
    """Text and timestamps follow one rule."""
    texts = [{**row, "t": "2013-02-08T10:00:00"} for row in rows(3, bad=0)]
    pond = play(pipeline())
    with pytest.raises(mp.InvalidError, match=r'too many records.*no time zone.*at_zone="UTC"'):
        pond.inject("in", texts)

    pond.make = pipeline(at_zone="+01:00")
    pond.restart()
    pond.inject("in", texts)
    assert pond.watermark("checked") == int(datetime(2013, 2, 8, 9, tzinfo=UTC).timestamp() * 1e6)


def test_text_that_is_no_utf8_makes_its_own_dead_letter(play: Open) -> None:
    """Files of Parquet and Spark's own files may have such bytes; the letter shows them replaced.

    The least key of the first records is one that Spark's driver looks at to cut intervals.
    """
    given = pa.Table.from_pylist([{**row, "word": "fine", "part": "p"} for row in rows(5, bad=0)])
    bytes_of = pa.array([b"a", b"x\xffy", b"c", b"d", None], pa.binary())
    words = pa.Array.from_buffers(pa.string(), 5, bytes_of.buffers())
    keys = pa.Array.from_buffers(
        pa.string(), 5, pa.array([b"k", b"k", b"a\xe4", b"k", b"k"], pa.binary()).buffers()
    )
    given = given.set_column(given.column_names.index("word"), "word", words)
    pond = play(pipeline())
    pond.inject("in", given.set_column(0, "k", keys))

    assert pond.states("checked") == {"k": "3"}
    letters = sorted(map(orjson.loads, pond.states("dead_letters").values()), key=lambda letter: letter["id"])
    assert [letter["error"] for letter in letters] == [
        "the text of column word is no UTF-8", "the text of column k is no UTF-8",
    ]  # fmt: skip
    assert [mp.letter_value(letter)[name] for letter, name in zip(letters, ("word", "k"), strict=True)] == [
        "x\ufffdy",
        "a\ufffd",
    ]


class Tagged(mp.Computation):
    """Keeps the map and the date of its records."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set([record.value["tags"], record.value["day"]])


def test_map_is_a_dict_and_date_that_python_lacks_is_a_letter_of_its_record(play: Open) -> None:
    """Its whole batch became dead letters."""
    given = pa.Table.from_pylist(rows(3, bad=0))
    tags = pa.array([[("a", 1)], [("a", 2)], None], pa.map_(pa.string(), pa.int64()))
    days = pa.array([0, 10_000_000, None], pa.int32()).cast(pa.date32())
    pond = play(pipeline(Tagged()))
    pond.inject("in", given.append_column("tags", tags).append_column("day", days))

    states = {key: decode_value(state) for key, state in pond.states("checked").items()}
    assert states == {"k0": [{"a": 1}, date(1970, 1, 1)], "k2": [None, None]}
    [letter] = map(orjson.loads, pond.states("dead_letters").values())
    assert letter["key"] == "k1"
    assert "a value of the row cannot be read" in letter["error"]
