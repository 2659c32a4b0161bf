"""The skew limit: a stream that is too far ahead waits for the slowest, on both runners."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.time.watermark_policies import Monotone
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
START_US = 1_800_000_000_000_000
WAIT_MS = 60_000


class Join(Computation):
    """Keeps fast records until event time has passed them, as a join with a slow stream does."""

    def process_record(self, context: Any, record: Any) -> None:
        if record.stream == "fast":
            context.state.set([*context.state.get([]), record.at])
            context.set_timer(record.at, tag=str(record.at))

    def process_timer(self, context: Any, timer: Any) -> None:
        context.state.set([at for at in context.state.get([]) if at != timer.at])


def joined(limit: str | None, **options: Any) -> EnginePipeline:
    """A fast stream with a limit and a slow one without."""
    pipeline = EnginePipeline("skew")
    pipeline.inject("fast", key="k", at="t", watermark=Monotone(), skew_limit=limit)
    pipeline.inject("slow", key="k", at="t", watermark=Monotone(), **options)
    pipeline.add(Join(), name="join", subscribes={"fast": None, "slow": None})
    return pipeline


def row(at: int) -> dict[str, Any]:
    return {"k": "k", "t": START_US + at}


def stepping(pipeline: EnginePipeline, clock: ManualClock | None = None) -> tuple[Store, LocalRun]:
    used = clock or ManualClock(START_US)
    store = Store.in_memory(clock=used, rng=SeededRng(1))
    runner = LocalRunner(store, clock=used, rng=SeededRng(2), progress=False, intake_records_max=50)
    return store, runner.start(pipeline, stepping=True)


def inject_as_far_as_allowed(run: LocalRun, minutes: range) -> int:
    """Inject a fast row per minute until the run refuses one; return the next minute."""
    for minute in minutes:
        try:
            run.inject("fast", row(minute * MINUTE_US))
        except UnavailableError:
            return minute
        run.run_until_quiet()
    return minutes.stop


def kept(store: Store) -> int:
    """Return the number of records that the join keeps."""
    rows = store.rows_view("join").to_arrow().to_pylist()
    return sum(len(json.loads(row["state"])) for row in rows)


def test_limit_bounds_the_state_with_one_source_an_hour_behind() -> None:
    store, run = stepping(joined("10m"))
    run.inject("slow", row(0))
    run.run_until_quiet()
    most, minute = 0, 0
    for slow_minute in range(1, 62):
        minute = inject_as_far_as_allowed(run, range(minute, 61))
        most = max(most, kept(store))
        run.inject("slow", row(slow_minute * MINUTE_US))
        run.run_until_quiet()

    assert minute == 61
    # Allow ten minutes, and the record that exceeds them.
    assert most == 11
    assert kept(store) == 0
    assert run.summary().totals.late == 0


def test_no_limit_keeps_the_whole_skew() -> None:
    store, run = stepping(joined(None))
    run.inject("slow", row(0))

    assert inject_as_far_as_allowed(run, range(1, 61)) == 61
    assert kept(store) == 60


def test_refusal_names_the_stream() -> None:
    """The slow stream continues, and injected records keep their order."""
    _, run = stepping(joined("1m"))
    run.inject("slow", row(0))
    run.inject("fast", row(0))
    run.step()
    run.inject("fast", row(HOUR_US))
    run.step()

    with pytest.raises(UnavailableError, match="ahead than its skew limit"):
        run.inject("fast", row(HOUR_US + 1))
    run.inject("slow", row(HOUR_US))
    run.run_until_quiet()
    run.inject("fast", row(HOUR_US + 1))
    run.run_until_quiet()

    assert run.summary().totals.injected == 5


def test_idle_source_does_not_limit_others() -> None:
    clock = ManualClock(START_US)
    _, run = stepping(joined("1m", idle_after="5s"), clock)
    run.inject("slow", row(0))
    run.inject("fast", row(HOUR_US))
    run.run_until_quiet()
    with pytest.raises(UnavailableError):
        run.inject("fast", row(HOUR_US + 1))

    clock.advance_ms(4_000)
    run.inject("slow", row(1))
    clock.advance_ms(4_000)
    run.run_until_quiet()
    with pytest.raises(UnavailableError):
        run.inject("fast", row(HOUR_US + 1))
    clock.advance_ms(5_000)
    run.run_until_quiet()

    run.inject("fast", row(HOUR_US + 1))
    run.run_until_quiet()
    assert run.summary().totals.injected == 4


def test_injecting_thread_blocks_and_loses_nothing() -> None:
    store = Store.in_memory(clock=SystemClock(), rng=SystemRng())
    runner = LocalRunner(store, progress=False, intake_records_max=50)
    with runner.start(joined("10m")) as run:

        def inject(stream: str) -> None:
            for minute in range(61):
                run.inject(stream, row(minute * MINUTE_US))

        fast = threading.Thread(target=inject, args=("fast",))
        fast.start()
        inject("slow")
        fast.join(WAIT_MS / 1_000)

        assert run.run_until_quiet(timeout=f"{WAIT_MS}ms")
        assert run.summary().totals.injected == 122
    assert kept(store) == 0


@pytest.mark.parametrize("limit", [0, "-1s", "far"])
def test_invalid_limit_is_refused_when_declared(limit: Any) -> None:
    with pytest.raises(InvalidError):
        joined(limit)


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(600):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError("it never came true")


def test_limit_bounds_the_state_on_spark(tmp_path: Path, spark: SparkSession) -> None:
    """The fast stream takes its limit and one more batch, and continues after the slow stream."""
    registry, clock = MemoryRegistry(), SystemClock()
    store = Store.open(
        tmp_path / "pond",
        clock=clock,
        rng=SystemRng(),
        leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
    )

    def write(stream: str, *at: int) -> None:
        lines = "".join(json.dumps(row(at_us)) + "\n" for at_us in at)
        hidden = tmp_path / stream / f".{at[0]}"
        hidden.write_text(lines)
        # Spark orders files by modification time, and one clock tick may cover all of these.
        modified_s = 1_700_000_000 + at[0] // 1_000_000
        os.utime(hidden, (modified_s, modified_s))
        hidden.rename(tmp_path / stream / f"{at[0]:020}.json")

    def streaming(stream: str) -> Any:
        (tmp_path / stream).mkdir()
        reader = spark.readStream.schema("k string, t long").option("maxFilesPerTrigger", 1)
        return reader.json(str(tmp_path / stream))

    frames = {name: streaming(name) for name in ("fast", "slow")}
    for minute in range(10, 70, 10):
        write("fast", minute * MINUTE_US)
    write("slow", 0)
    runner = SparkRunner(store, spark=spark, progress=False, tick="50ms", intervals=1)
    run = runner.start(joined("10m"), frames)

    def injected() -> int:
        return run.summary().totals.injected

    try:
        # Ten minutes of skew allow the twentieth minute, and nothing later.
        wait_until(lambda: injected() == 3)
        threading.Event().wait(1.5)
        assert injected() == 3
        assert kept(store) == 2

        write("slow", 30 * MINUTE_US)
        wait_until(lambda: injected() == 7 and kept(store) == 2)
        threading.Event().wait(1.5)
        assert injected() == 7

        write("slow", 60 * MINUTE_US)
        wait_until(lambda: injected() == 9 and kept(store) == 0)
        assert run.summary().totals.late == 0
    finally:
        run.stop()
        store.close()
