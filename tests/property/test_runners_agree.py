"""One pipeline and script on the model, the local runner and Spark (I8)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings

from millpond.executor.computation.timers import Timer
from millpond.executor.inputs.positions import input_positions
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.pipelines import Case, cases
from tests.oracles.model_pipeline import ModelPipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Answer = tuple[dict[str, dict[str, Any]], dict[str, Counter[tuple[str, str, int]]], int]
"""Rows by computation and key, productions by stream as a multiset, number of dead letters."""

_WALL_US = 1_800_000_000_000_000
_SCHEMA = "k string, at long, id string, n long"


def _by_model(case: Case, *, weak: bool = True) -> Answer:
    model = ModelPipeline(case.pipeline(weak=weak).check())
    wall = _WALL_US
    for step in case.steps:
        wall += step.wall_us
        model.superstep({} if step.stream is None else {step.stream: step.rows}, wall)
    model.finish(wall)
    rows = {
        f"c{number}": {
            key: (
                row.state,
                sorted((t.tag, _in_row(t), int(t.at), int(t.output_at)) for t in row.timers.values()),
            )
            for key, row in model.rows(f"c{number}").items()
        }
        for number in range(len(case.nodes))
    }
    produced = {
        stream: Counter(
            (production.key, orjson.dumps(production.value).decode(), production.at) for production in made
        )
        for stream, made in model.produced.items()
        if stream in case.sunk
    }
    return rows, produced, model.dead_letters


def _in_row(timer: Timer) -> str:
    return str(timer.domain) if timer.holds else f"{timer.domain}/free"


def _answer(store: Store, case: Case, sinks: Path) -> Answer:
    rows = {}
    for number in range(len(case.nodes)):
        table = store.rows_view(f"c{number}").to_arrow()
        rows[f"c{number}"] = {
            row["key"]: (
                row["state"] if row["state_bytes"] is None else row["state_bytes"],
                sorted(
                    (t["tag"], t["domain"], _micros(t["at"]), _micros(t["output_at"])) for t in row["timers"]
                ),
            )
            for row in table.to_pylist()
        }
    produced = {}
    for stream in case.sunk:
        made = _sunk(sinks / stream)
        if made:
            produced[stream] = made
    return rows, produced, store.rows_view("dead_letters").to_arrow().num_rows


def _sunk(path: Path) -> Counter[tuple[str, str, int]]:
    if not (path / "_delta_log").exists():
        return Counter()
    table = DeltaTable(path).to_pyarrow_table()
    return Counter(
        (row["key"], orjson.dumps(orjson.loads(row["value"])).decode(), _micros(row["at"]))
        for row in table.to_pylist()
    )


def _micros(moment: Any) -> int:
    seconds = int(moment.replace(microsecond=0).timestamp())
    return seconds * 1_000_000 + int(moment.microsecond)


def _with_sinks(case: Case, sinks: Path) -> EnginePipeline:
    pipeline = case.pipeline()
    for stream in case.sunk:
        pipeline.stream(stream).sink(f"sink-{stream}", DeltaSink(str(sinks / stream)))
    return pipeline


def _by_local_runner(case: Case, folder: Path, *, restart: bool, checkpoint_weak_after: str = "1s") -> Answer:
    clock = ManualClock(_WALL_US)
    disk, registry = MemoryObjects(), MemoryRegistry()

    def opened() -> Any:
        store = Store.in_memory(objects=disk, registry=registry, clock=clock, rng=SeededRng(1))
        runner = LocalRunner(
            store,
            clock=clock,
            rng=SeededRng(2),
            progress=False,
            dead_letter_limit=None,
            checkpoint_weak_after=checkpoint_weak_after,
        )
        return store, runner.start(_with_sinks(case, folder), stepping=True)

    store, run = opened()
    for step in case.steps:
        clock.advance_ms(step.wall_us / 1_000)
        if step.stream is not None:
            run.inject(step.stream, list(step.rows))
        run.step()
        if restart:
            run.stop()
            store.close()
            store, run = opened()
    for number in range(len(case.injectors)):
        run.finish(f"in{number}")
    run.run_until_quiet()
    run.stop()
    answer = _answer(store, case, folder)
    store.close()
    return answer


def _by_spark(case: Case, folder: Path, spark: SparkSession) -> Answer:
    clock, registry = ManualClock(_WALL_US), MemoryRegistry()
    store = Store.open(
        folder / "pond",
        clock=clock,
        rng=SeededRng(3),
        leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
    )
    runner = SparkRunner(store, spark=spark, clock=clock, progress=False, intervals=2, dead_letter_limit=None)
    run = runner.open(_with_sinks(case, folder))
    for step in case.steps:
        clock.advance_ms(step.wall_us / 1_000)
        if step.stream is None:
            run.advance()
            continue
        frame = spark.createDataFrame([tuple(row.values()) for row in step.rows], _SCHEMA).coalesce(1)
        known = input_positions(store.committer.snapshot.txns, "case", step.stream)
        batch = known.get("test", -1) + 1
        run.consume(frame, InputPosition(stream=step.stream, source="test", batch=batch))
    run.finish_inputs()
    run.stop()
    answer = _answer(store, case, folder)
    store.close()
    return answer


@given(case=cases())
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_local_runner_agrees_with_the_model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert _by_local_runner(case, tmp_path_factory.mktemp("local"), restart=False) == _by_model(case)


@given(case=cases())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_restarts_between_all_steps_change_nothing(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert _by_local_runner(case, tmp_path_factory.mktemp("local"), restart=True) == _by_model(case)


@given(case=cases())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_late_weak_productions_equal_strong_ones(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every weak production is checkpointed before it is consumed."""
    result = _by_local_runner(
        case, tmp_path_factory.mktemp("late"), restart=True, checkpoint_weak_after="-1ms"
    )

    assert result == _by_model(case, weak=False)


@pytest.mark.spark
@given(case=cases(steps_max=3))
@settings(
    deadline=None,
    max_examples=8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_spark_agrees_with_the_model(
    case: Case, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> None:
    assert _by_spark(case, tmp_path_factory.mktemp("spark"), spark) == _by_model(case)
