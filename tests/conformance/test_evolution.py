"""A pipeline whose code has changed: computations are renamed or dropped, and never orphaned silently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import Monotone
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.rows.codec import BytesCodec, JsonCodec, MsgpackCodec
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import plays

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millpond.statestore.rows.codec import Codec

START_US = 1_800_000_000_000_000
SECOND_US = 1_000_000
Make = Callable[[], EnginePipeline]
Open = Callable[[Make], Any]


class Tally(Computation):
    """Counts its records and forwards them; a timer ten seconds after each adds a hundred.

    Args:
        codec: the codec of its states.
        output: the stream that it produces to.
    """

    def __init__(self, codec: Codec | None = None, output: str = "") -> None:
        self.codec = codec or JsonCodec()
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)
        context.set_timer(record.at + 10 * SECOND_US, tag="end")
        if self.output:
            context.produce(self.output, record.value)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.state.set(context.state.get(0) + 100)


class Latin1(JsonCodec):
    name = "latin1"  # type: ignore[misc]  # this is what the test is about


def rows(*at: int, key: str = "k") -> list[dict[str, Any]]:
    return [{"k": key, "t": START_US + second * SECOND_US, "id": f"{key}{second}"} for second in at]


def tally(name: str, codec: Codec | None = None, drop: tuple[str, ...] = (), **options: Any) -> Make:
    def make() -> EnginePipeline:
        pipeline = EnginePipeline("p", drop=drop)
        stream = pipeline.inject("s", key="k", at="t", id="id", watermark=Monotone())
        stream.apply(Tally(codec), name=name, **options)
        return pipeline

    return make


def chain(
    first: str, last: str, drop: tuple[str, ...] = (), *, with_first: bool = True, **former: str
) -> Make:
    """Return two computations in a row, each on the stream named after its predecessor."""

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("p", drop=drop)
        stream = pipeline.inject("s", key="k", at="t", id="id", watermark=Monotone())
        if with_first:
            stream.apply(Tally(output=first), name=first, renamed_from=former.get(first))
        source = first if with_first else "s"
        # Productions may be pending on the stream of a dropped computation.
        subscribes: dict[str, None] = {source: None}
        pipeline.add(Tally(), name=last, subscribes=subscribes, renamed_from=former.get(last))
        return pipeline

    return make


class Facts:
    def test_vanished_computation_is_refused_with_both_ways_out(self, play: Open) -> None:
        """A renamed computation must not silently start empty."""
        run = play(tally("old"))
        run.inject("s", rows(1, 2))

        run.make = tally("new")
        with pytest.raises(InvalidError, match=r"renamed_from= .* drop=.*computation=.old.*new="):
            run.restart()

        run.make = tally("old")
        run.reopen()
        assert run.states("old") == {"k": "2"}

    def test_renamed_computation_keeps_rows_ids_timers_and_watermark(self, play: Open) -> None:
        """The rename may stay in the code, be removed, or be reversed."""
        run = play(tally("old"))
        run.inject("s", rows(1, 2))
        run.inject("s", rows(5, key="other"))

        for make in (tally("new", renamed_from="old"), tally("new", renamed_from="old"), tally("new")):
            run.make = make
            run.restart()
            assert run.watermark("new") == START_US + 5 * SECOND_US
        run.inject("s", rows(2, 3))
        assert run.states("new") == {"k": "3", "other": "1"}
        assert run.states("old") == {}
        stored = DeltaTable(run.store.objects.url).to_pyarrow_table(columns=["computation", "superstep"])
        assert set(stored["computation"].to_pylist()) == {"new"}, "Delta's own readers see it too"
        run.make = tally("old", renamed_from="new")
        run.restart()
        run.inject("s", [*rows(3), *rows(60, key="late")])
        run.settle()

        assert run.states("old") == {"k": "103", "other": "101", "late": "1"}
        assert run.run.summary().totals.timers == 2
        assert run.run.summary().totals.by_computation.keys() <= {"old"}

    def test_pending_productions_follow_the_rename(self, play: Open) -> None:
        run = play(chain("old", "sum"))
        run.inject("s", rows(1, 2))
        assert run.states("sum") == {}

        run.make = chain("new", "total", new="old", total="sum")
        run.restart()
        run.restart()
        run.settle()

        assert run.states("total") == {"k": "2"}

    def test_dropped_computation_leaves_only_its_productions(self, play: Open) -> None:
        """Its rows hold nothing back, and its name is free."""
        run = play(chain("first", "last"))
        run.inject("s", rows(1, 2))

        def without_first() -> EnginePipeline:
            pipeline = EnginePipeline("p", drop=("first",))
            pipeline.inject("s", key="k", at="t", id="id", watermark=Monotone()).apply(
                Tally(output="first"), name="other", produces="first"
            )
            pipeline.stream("first").apply(Tally(), name="last")
            return pipeline

        run.make = without_first
        run.restart()
        run.restart()
        run.settle()
        assert run.states("last") == {"k": "2"}
        assert run.states("first") == {}
        assert run.store.snapshot().files_in("first") == ()
        assert run.store.sql().execute("select count(*) from dead_letters").fetchall() == [(0,)]
        run.inject("s", rows(30))
        run.settle()
        assert run.watermark("last") == START_US + 30 * SECOND_US

        run.make = chain("first", "last", drop=("other",))
        run.restart()
        run.inject("s", rows(40))
        assert run.states("first") == {"k": "1"}

    def test_changed_codec_is_refused(self, play: Open) -> None:
        """Two text codecs differ as well, also under a new name."""
        run = play(tally("c"))
        run.inject("s", rows(1))

        for make in (
            tally("c", MsgpackCodec()),
            tally("c", Latin1()),
            tally("d", Latin1(), renamed_from="c"),
        ):
            run.make = make
            with pytest.raises(InvalidError, match=r"another codec.*drop=.*written_by=.json"):
                run.restart()
            run.make = tally("c")
            run.reopen()
        run.make = tally("fresh", MsgpackCodec(), drop=("c",))
        run.restart()
        run.make = tally("c", BytesCodec(), drop=("fresh",))
        run.restart()

    def test_changed_number_of_intervals_is_refused(self, play: Open) -> None:
        """Keys are cut once: a later run declares the same number, the number that was cut, or none."""
        keyed = [row for key in "abcdefghij" for row in rows(1, key=key)]
        run = play(tally("c", intervals=3))
        run.inject("s", keyed)

        for number in (3, None):
            run.make = tally("c", intervals=number)
            run.restart()
        run.make = tally("c", intervals=8)
        with pytest.raises(InvalidError, match=r"cut into another number.*intervals=`8`.*stored=`3`"):
            run.restart()
        run.make = tally("c", intervals=3)
        run.reopen()

    def test_fewer_keys_than_declared_intervals_open_again(self, play: Open) -> None:
        run = play(tally("c", intervals=8))
        run.inject("s", rows(1))

        run.restart()
        run.make = tally("c", intervals=4)
        with pytest.raises(InvalidError, match="cut into another number"):
            run.restart()
        run.make = tally("c")
        run.reopen()


class _Opened:
    def __init__(self, play: Any) -> None:
        self.play = play

    def __getattr__(self, name: str) -> Any:
        return getattr(self.play, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "play":
            object.__setattr__(self, name, value)
        else:
            setattr(self.play, name, value)

    def reopen(self) -> None:
        """Start on a fresh handle of the store; the refused start left no run."""
        self.play.store.close()
        self.play.store = self.play._open_store()
        self.play.start()


@pytest.fixture
def local_play(tmp_path: Path) -> Iterator[Open]:
    """Plays on the local runner."""
    with plays(tmp_path, ManualClock) as start:
        yield lambda make: _Opened(start(make))


class TestLocally(Facts):
    @pytest.fixture
    def play(self, local_play: Open) -> Open:
        return local_play

    def test_interrupted_rename_is_completed_by_the_next_start(self, play: Open) -> None:
        """The process dies before or after the commit of the rename."""

        class Died(BaseException):
            pass

        run = play(tally("c0"))
        run.inject("s", rows(1, 2))
        for number in range(12):
            name = f"c{number + 1}"
            run.make = tally(name, renamed_from=f"c{number}")
            run.stop()
            run.play.store = run.play._open_store()
            reached = [0]

            def die(_: str, reached: list[int] = reached, last: int = number) -> None:
                reached[0] += 1
                if reached[0] > last * 2:
                    raise Died

            try:
                with listening(die):
                    run.start()
            except Died:
                run.reopen()
            assert run.states(name) == {"k": "2"}
        run.inject("s", [*rows(2), *rows(60, key="late")])
        run.settle()

        assert run.states("c12") == {"k": "102", "late": "1"}


@pytest.mark.spark
class TestOnSpark(Facts):
    @pytest.fixture
    def play(self, tmp_path: Path, spark: SparkSession) -> Iterator[Open]:
        with plays(tmp_path, ManualClock, spark) as start:
            yield lambda make: _Opened(start(make))

    def test_spark_reads_renamed_rows(self, play: Open, spark: SparkSession) -> None:
        """Delta's reader takes the partition from the log, not from file paths."""
        run = play(tally("old"))
        run.inject("s", rows(1, 2))
        run.make = tally("new", renamed_from="old")
        run.restart()

        answer = run.store.rows_view("new").to_spark(spark).select("key", "state").collect()
        assert [tuple(row) for row in answer] == [("k", "2")]
        assert run.store.rows_view("old").to_spark(spark).count() == 0
