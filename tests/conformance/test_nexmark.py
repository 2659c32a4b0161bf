"""Nexmark's queries compared with DuckDB and published answers, on both runners, in any order of arrival."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from examples.nexmark.answers import Bag, bag_of, differences, expected_answers, read_answer
from examples.nexmark.events import DATA, PUBLISHED, Events, load_events
from examples.nexmark.generator import Generator
from examples.nexmark.job import SIDE, pipeline, stream_local, stream_spark, wanted
from examples.nexmark.oracle import ask, fixed_events
from examples.nexmark.queries import QUERIES
from examples.nexmark.query import Query
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock
from millpond.testing.fixtures.determinism import ManualClock
from tests.tidy import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

FOLDERS = {"own": DATA} | ({"published": PUBLISHED} if PUBLISHED.is_dir() else {})
EVENTS = {place: load_events(folder) for place, folder in FOLDERS.items()}
EXPECTED = {place: expected_answers(folder) for place, folder in FOLDERS.items()}
WITHOUT_ANSWER = {"own": {"q12"}, "published": {"q6", "q12"}}
ALL = tuple(QUERIES.values())
KNOWN = [(place, name) for place in FOLDERS for name in QUERIES if name in EXPECTED[place]]
_PIECES = 12

ON_SPARK = ("q0", "q3", "q4", "q5", "q8", "q10", "q11", "q12", "q13", "q15", "q19", "q102", "q104", "q105")
"""Queries that together use every operator; ``-m spark_all`` runs all queries, one by one."""

NOT_BY_THE_CLOCK = tuple(query for query in ALL if query.name != "q12")
"""Queries whose answer does not depend on the wall clock."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with _store(tmp_path, SystemClock()) as opened:
        yield opened


def _store(folder: Path, clock: Clock) -> Store:
    registry = MemoryRegistry()
    return Store.open(
        folder / "pond",
        clock=clock,
        rng=SystemRng(),
        leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
    )


def _asked(queries: Sequence[Query], events: Events, store: Store, output: Path) -> dict[str, Bag]:
    runner = mp.LocalRunner(store, progress=False)
    runner.run(pipeline(queries, output), wanted(queries, events))
    return _answers(queries, output)


def _answers(queries: Sequence[Query], output: Path) -> dict[str, Bag]:
    return {query.name: read_answer(query, output) for query in queries}


def _wrong(answers: dict[str, Bag], expected: dict[str, Bag]) -> dict[str, list[str]]:
    wrong = {
        name: differences(answer, expected[name]) for name, answer in answers.items() if name in expected
    }
    return {name: lines for name, lines in wrong.items() if lines}


# ------------------------------------------------------------------------------------- local runner


@pytest.mark.parametrize("place", FOLDERS)
def test_almost_all_queries_have_an_answer(place: str) -> None:
    """DuckDB cannot answer q12, and q6 has no published answer."""
    assert set(QUERIES) - set(EXPECTED[place]) == WITHOUT_ANSWER[place]
    assert set(EXPECTED[place]) <= set(QUERIES)
    assert all(EXPECTED[place].values())


@pytest.mark.parametrize("place", FOLDERS)
def test_checked_in_answers_are_those_of_duckdb(place: str) -> None:
    answers = ask(EVENTS[place])
    missing = set(answers) - set(EXPECTED[place])

    assert not _wrong({name: bag_of(answer.rows) for name, answer in answers.items()}, EXPECTED[place])
    assert missing == WITHOUT_ANSWER[place] - {"q12"}
    assert {name: answer.columns for name, answer in answers.items()} == {
        name: QUERIES[name].columns for name in answers
    }


def test_checked_in_events_are_the_generators() -> None:
    again = fixed_events()

    assert all(table.equals(again[kind].select(table.column_names)) for kind, table in EVENTS["own"].items())


def test_oracle_imports_no_pipeline() -> None:
    code = "import sys, examples.nexmark.oracle; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    modules = set(shown.stdout.split())

    assert "examples.nexmark.oracle" in modules
    assert not [name for name in modules if name.partition(".")[0] == "millpond" or name.endswith("_queries")]


@pytest.mark.parametrize(("place", "name"), KNOWN)
def test_on_the_local_runner(place: str, name: str, store: Store, tmp_path: Path) -> None:
    answers = _asked([QUERIES[name]], EVENTS[place], store, tmp_path)

    assert not _wrong(answers, EXPECTED[place])


def test_wall_clock_windows_start_from_zero(tmp_path: Path) -> None:
    """q12 counts the bids between two ticks of the clock."""
    clock, query = ManualClock(), QUERIES["q12"]
    rows = EVENTS["own"]["bids"].to_pylist()
    early, late = rows[:20], rows[20:]
    with _store(tmp_path, clock) as opened:
        runner = mp.LocalRunner(opened, clock=clock, progress=False)
        run = runner.start(pipeline([query], tmp_path), stepping=True)
        for piece in (early, late):
            run.inject("bids", piece)
            run.run_until_quiet()
            assert not read_answer(query, tmp_path) - _counted(early), "a window is shown when it is over"
            clock.advance_ms(10_000)
            run.run_until_quiet()
        run.stop()

    assert read_answer(query, tmp_path) == _counted(early) + _counted(late)


def _counted(bids: Sequence[dict[str, Any]]) -> Bag:
    counts = Counter(bid["bidder"] for bid in bids)
    return Counter((bidder, count) for bidder, count in counts.items())


@pytest.mark.parametrize("seed", [1])
def test_order_of_arrival_does_not_matter(seed: int, store: Store, tmp_path: Path) -> None:
    """Shuffled events, a few at a time, need retractions."""
    random = np.random.default_rng(seed)
    pieces: list[tuple[str, pa.Table]] = []
    for name, table in wanted(ALL, EVENTS["own"]).items():
        size = table.num_rows if name == SIDE else -(-table.num_rows // _PIECES)
        shuffled = table.take(pa.array(random.permutation(table.num_rows)))
        pieces += [(name, shuffled.slice(start, size)) for start in range(0, table.num_rows, size)]
    run = mp.LocalRunner(store, progress=False).start(
        pipeline(ALL, tmp_path, watermark=mp.Perfect()), stepping=True
    )
    for index in random.permutation(len(pieces)).tolist():
        run.inject(*pieces[index])
        run.step()
    for name in {name for name, _ in pieces}:
        run.finish(name)
    run.run_until_quiet()
    summary = run.stop()

    assert not _wrong(_answers(ALL, tmp_path), EXPECTED["own"])
    assert summary.totals.dead_letters == 0


def test_stream_ends_with_the_answer_of_a_bounded_run(store: Store, tmp_path: Path) -> None:
    generator = Generator(seed=5, rate=100, out_of_order=10)
    whole = _asked(NOT_BY_THE_CLOCK, generator.events(1_500), store, tmp_path / "whole")
    with _store(tmp_path / "stream", SystemClock()) as opened:
        pieces = (generator.events(500, first) for first in range(0, 1_500, 500))
        summary = stream_local(NOT_BY_THE_CLOCK, pieces, opened, tmp_path / "stream")
    streamed = _answers(NOT_BY_THE_CLOCK, tmp_path / "stream")

    assert not _wrong(streamed, whole)
    assert sum(bag.total() for bag in whole.values()) > 5_000
    assert summary.totals.late == summary.totals.dead_letters == 0


# -------------------------------------------------------------------------------------------- Spark


def test_query_set_on_spark_gives_duckdbs_answers(spark: SparkSession, store: Store, tmp_path: Path) -> None:
    """One pipeline has queries that use every operator."""
    queries = [QUERIES[name] for name in ON_SPARK]
    _ask_spark(spark, queries, EVENTS["own"], store, tmp_path)

    assert not _wrong(_answers(queries, tmp_path), EXPECTED["own"])
    assert read_answer(QUERIES["q12"], tmp_path).total() > 0


def test_query_set_uses_every_module() -> None:
    modules = {query.build.__module__ for query in ALL}

    assert {QUERIES[name].build.__module__ for name in ON_SPARK} == modules


@pytest.mark.spark_all
@pytest.mark.parametrize(("place", "name"), KNOWN)
def test_each_of_them_on_spark(
    place: str, name: str, spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    _ask_spark(spark, [QUERIES[name]], EVENTS[place], store, tmp_path)

    assert not _wrong(_answers([QUERIES[name]], tmp_path), EXPECTED[place])


@pytest.mark.spark_all
@pytest.mark.timeout(900)
def test_spark_stream_ends_with_the_answer_of_a_bounded_run(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    """Three streaming queries feed one pipeline."""
    generator = Generator(seed=5, rate=100, out_of_order=10)
    whole = _asked(NOT_BY_THE_CLOCK, generator.events(1_500), store, tmp_path / "whole")
    pieces = (generator.events(500, first) for first in range(0, 1_500, 500))
    stream_spark(NOT_BY_THE_CLOCK, pieces, tmp_path / "stream" / "pond", tmp_path / "stream", spark)
    streamed = _answers(NOT_BY_THE_CLOCK, tmp_path / "stream")

    assert not _wrong(streamed, whole)


def _ask_spark(
    spark: SparkSession, queries: Sequence[Query], events: Events, store: Store, output: Path
) -> None:
    frames = {name: spark.createDataFrame(table) for name, table in wanted(queries, events).items()}
    mp.SparkRunner(store, spark=spark, progress=False).run(pipeline(queries, output), frames)
