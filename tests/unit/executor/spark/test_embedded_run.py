"""The run that a pipeline's functions share, without Spark."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.spark.foreach_batch import EmbeddedRun, ForeachBatch
from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.errors import InvalidError, QueryStoppedError, UnavailableError


@dataclass
class Batch:
    """A frame that knows the start of its query, as Spark's own thread does."""

    start: str

    @property
    def sparkSession(self) -> Any:  # noqa: N802 - Spark's name
        properties = {"sql.streaming.queryId": "q", "spark.jobGroup.id": self.start}
        context = SimpleNamespace(getLocalProperty=properties.get)
        return SimpleNamespace(_jsparkSession=SimpleNamespace(sparkContext=lambda: context))


@dataclass
class Run:
    """A run that records its calls; a negative batch fails, and nothing succeeds after it."""

    number: int
    topology: Any
    events: list[str]
    during: dict[int, Callable[[], None]]
    failure: Exception | None = None
    is_stopped: bool = False
    fed: set[str] = field(default_factory=set)

    @property
    def is_active(self) -> bool:
        return self.failure is None and not self.is_stopped

    def start_ticker(self) -> None:
        pass

    def on_batch(self, stream: str) -> Callable[[Any, int], None]:
        def consume(_frame: Any, batch: int) -> None:
            self.during.pop(batch, lambda: None)()
            if self.is_stopped:
                raise InvalidError("the run has been stopped")
            if batch < 0 and self.failure is None:
                stop = QueryStoppedError("stopped", input=stream)
                self.failure = stop if batch == -1 else UnavailableError("away")
            if self.failure is not None:
                raise self.failure
            self.fed.add(stream)
            self.events.append(f"{self.number}: {stream} {batch}")

        return consume

    def abandon(self) -> None:
        self.is_stopped = True
        self.events.append(f"{self.number}: abandoned")

    def has_work(self) -> bool:
        return False

    def run_until_quiet(self) -> None:
        self.events.append(f"{self.number}: work")

    def stop(self) -> None:
        self.is_stopped = True
        self.events.append(f"{self.number}: stopped")

    def note_unfed(self, streams: list[str]) -> None:
        pass

    def summary(self) -> Any:
        skipped = dict.fromkeys(self.topology.injectors.keys() - self.fed)
        return SimpleNamespace(skipped=skipped, ended=())


@dataclass
class Bench:
    """A pipeline of two streams whose runs record ``events``; ``during`` maps batches to actions in their
    middle.
    """

    pipeline: Pipeline
    events: list[str] = field(default_factory=list)
    during: dict[int, Callable[[], None]] = field(default_factory=dict)
    embedded: EmbeddedRun = field(init=False)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.embedded = EmbeddedRun(self.pipeline, "pond")

    def function(self, stream: str, **options: Any) -> ForeachBatch:
        self.embedded.join(stream, options, lambda _: self)
        return ForeachBatch(self.embedded, stream)

    def open(self, pipeline: Pipeline) -> Run:
        self.runs.append(Run(len(self.runs) + 1, pipeline.check(), self.events, self.during))
        return self.runs[-1]


def _pipeline(name: str = "p") -> Pipeline:
    pipeline = Pipeline(name)
    for stream in ("left", "right"):
        pipeline.inject(stream, key="k", at="t").apply(Computation(), name=f"of_{stream}")
    return pipeline


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(_pipeline())
    yield made
    made.embedded.abandon()


def test_functions_share_the_run_that_the_first_batch_opens(bench: Bench) -> None:
    """Closing one function closes the run for all."""
    left, right = bench.function("left"), bench.function("right")
    right(Batch("r1"), 0)
    left(Batch("l1"), 0)
    left.close()
    right.close()

    assert bench.events == ["1: right 0", "1: left 0", "1: work", "1: stopped"]


def test_failure_reaches_other_queries_and_a_restarted_query_continues(bench: Bench) -> None:
    """A query that fed the failed run gets the error at its next batch."""
    left, right = bench.function("left"), bench.function("right")
    left(Batch("l1"), 0)
    right(Batch("r1"), 0)
    with pytest.raises(UnavailableError) as first:
        left(Batch("l1"), -2)
    left(Batch("l2"), 1)
    with pytest.raises(UnavailableError) as second:
        right(Batch("r1"), 1)
    right(Batch("r2"), 1)

    assert second.value is first.value
    assert bench.events == ["1: left 0", "1: right 0", "1: abandoned", "2: left 1", "2: right 1"]


def test_query_that_fed_nothing_continues_after_a_failure(bench: Bench) -> None:
    """None of its batches has failed."""
    left, right = bench.function("left"), bench.function("right")
    with pytest.raises(UnavailableError):
        left(Batch("l1"), -2)
    right(Batch("r1"), 0)

    assert bench.events == ["1: abandoned", "2: right 0"]


def test_query_stopped_in_a_batch_fails_alone(bench: Bench) -> None:
    """The next batch of another query opens the run again."""
    left, right = bench.function("left"), bench.function("right")
    right(Batch("r1"), 0)
    with pytest.raises(QueryStoppedError):
        left(Batch("l1"), -1)
    right(Batch("r1"), 1)
    left(Batch("l2"), 0)

    assert bench.events == ["1: right 0", "1: abandoned", "2: right 1", "2: left 0"]


def test_batch_is_processed_by_the_next_run_when_another_query_stops(bench: Bench) -> None:
    """The run ends before the batch's processing starts."""
    left, right = bench.function("left"), bench.function("right")

    def stop_left() -> None:
        bench.runs[0].failure = QueryStoppedError("stopped", input="left")

    bench.during[0] = stop_left
    right(Batch("r1"), 0)
    left(Batch("l2"), 1)

    assert bench.events == ["1: abandoned", "2: right 0", "2: left 1"]


def test_batch_during_close_is_processed_by_the_next_run(bench: Bench) -> None:
    """Closing must not fail a query that continues."""
    left, right = bench.function("left"), bench.function("right")
    bench.during[1] = left.close
    right(Batch("r1"), 0)
    right(Batch("r1"), 1)

    assert bench.events == ["1: right 0", "1: work", "1: stopped", "2: right 1"]


def test_batch_fails_when_every_run_is_closed_under_it(bench: Bench) -> None:
    """The number of attempts is bounded."""
    function = bench.function("left")

    class Closing(dict[int, Callable[[], None]]):
        def pop(self, *_: Any) -> Callable[[], None]:
            return function.close

    bench.during = Closing()
    with pytest.raises(UnavailableError, match="closed again and again"):
        function(Batch("l1"), 0)

    assert len(bench.runs) == 10


def test_with_block_finishes_the_work_unless_it_raises(bench: Bench) -> None:
    """Either way the leases are released."""
    with bench.function("left") as function:
        function(Batch("l1"), 0)

    def fail() -> None:
        with bench.function("left") as function:
            function(Batch("l2"), 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()

    assert bench.events == ["1: left 0", "1: work", "1: stopped", "2: left 1", "2: abandoned"]


def test_batch_at_the_end_of_the_process_is_refused(bench: Bench) -> None:
    """The released leases must stay free for the next process."""
    function = bench.function("left")
    function(Batch("l1"), 0)
    bench.embedded._close_at_exit()
    with pytest.raises(UnavailableError, match="the process ends"):
        function(Batch("l1"), 1)

    assert bench.events == ["1: left 0", "1: stopped"]


def test_functions_must_agree_on_the_options_of_their_run(bench: Bench) -> None:
    """Options are fixed from the first batch to the end of the run."""
    left = bench.function("left", intervals=2, tick="50ms")
    bench.function("right")
    bench.function("right", intervals=2, cache_mib=64)
    with pytest.raises(InvalidError, match=r"share one run.*option=`intervals` given=`3` before=`2`"):
        bench.function("right", intervals=3)
    left(Batch("l1"), 0)
    with pytest.raises(InvalidError, match=r"has begun without this option.*option=`durability`"):
        bench.function("right", durability="disk")
    left.close()
    bench.function("right", intervals=3)
    with pytest.raises(InvalidError, match="share one run"):
        bench.function("left", intervals=2)


def test_run_is_available_from_the_first_batch_to_the_end(bench: Bench) -> None:
    function = bench.function("left")
    with pytest.raises(InvalidError, match="the first batch of a query opens it"):
        _ = function.run
    function(Batch("l1"), 0)
    assert function.run is bench.runs[0]

    function.close()
    with pytest.raises(InvalidError, match="no run is open"):
        _ = function.run


def test_stream_without_a_function_is_warned_of_at_the_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream whose query had no rows is no mistake."""
    caplog.set_level(logging.INFO, "millpond")
    function = bench.function("left")
    function(Batch("l1"), 0)
    assert "first=`left` others=`['right']`" in caplog.text

    function.close()
    assert 'pipeline.foreach_batch(store, into="right") makes one' in caplog.text

    caplog.clear()
    bench.function("right")
    function(Batch("l2"), 1)
    function.close()
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_second_pipeline_of_the_same_name_takes_over_with_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The former run's queries get an error that advises sharing one Pipeline object."""
    other = Bench(_pipeline(), bench.events)
    former, latter = bench.function("left"), other.function("right")
    former(Batch("l1"), 0)
    latter(Batch("r1"), 0)
    with pytest.raises(InvalidError, match="functions of all streams from one Pipeline object"):
        former(Batch("l1"), 1)
    latter(Batch("r1"), 1)
    latter.close()

    assert bench.events == ["1: left 0", "1: abandoned", "1: right 0", "1: right 1", "1: work", "1: stopped"]
    assert "another pipeline of this name" in caplog.text


def test_pipelines_of_different_names_run_side_by_side(bench: Bench) -> None:
    other = Bench(_pipeline("another"), bench.events)
    bench.function("left")(Batch("l1"), 0)
    other.function("left")(Batch("l2"), 0)
    other.embedded.abandon()

    assert bench.events == ["1: left 0", "1: left 0", "1: abandoned"]


def test_queries_that_start_at_once_open_one_run(bench: Bench) -> None:
    """Each query has its own thread."""
    functions = [bench.function("left"), bench.function("right")] * 4
    barrier = threading.Barrier(len(functions))

    def call(number: int) -> None:
        barrier.wait()
        functions[number](Batch(f"q{number}"), number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(bench.runs) == 1
    assert len(bench.events) == len(functions)


def test_functions_of_one_pipeline_object_and_store_share_a_run(tmp_path: Path) -> None:
    pipeline, pond = _pipeline(), tmp_path / "pond"
    left, right = (pipeline.foreach_batch(pond, into=stream) for stream in ("left", "right"))
    again = pipeline.foreach_batch(str(pond), into="left")
    elsewhere = pipeline.foreach_batch(tmp_path / "other", into="left")
    another = _pipeline().foreach_batch(pond, into="left")

    assert left._embedded is right._embedded is again._embedded
    assert len({left._embedded, elsewhere._embedded, another._embedded}) == 3


@pytest.mark.parametrize(
    ("into", "options", "words"),
    [
        ("middle", {}, r"injects no such stream.*into=`middle` injected=`\['left', 'right'\]`"),
        ("left", {"interval": 2}, "no such option; did you mean 'intervals'\\? option=`interval`"),
        ("left", {"intervals": 0}, "intervals"),
    ],
)
def test_mistakes_are_refused_before_the_query_starts(
    tmp_path: Path, into: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidError, match=words):
        _pipeline().foreach_batch(tmp_path / "pond", into=into, **options)


def test_invalid_pipeline_refuses_to_make_functions(tmp_path: Path) -> None:
    pipeline = Pipeline("p")
    pipeline.inject("left", key="k", at="t")
    pipeline.stream("nowhere").apply(Computation(), name="c")
    with pytest.raises(InvalidError, match="nowhere"):
        pipeline.foreach_batch(tmp_path / "pond", into="left")
