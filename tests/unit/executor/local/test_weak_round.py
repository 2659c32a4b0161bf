"""Weak productions in the local runner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from deltalake import DeltaTable

from millpond.executor.computation.computation import Computation
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import InvalidError, OutcomeUnknownError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

CLOCKS: list[ManualClock] = []
RAN: Counter[str] = Counter()
GATE = threading.Event()


class Pass(Computation):
    """A step that forwards records, or counts them without an ``output``. It takes time on the test's clock
    or waits for the gate.
    """

    def __init__(self, output: str | None = None, takes_ms: float = 0, *, waits: bool = False) -> None:
        self.output = output
        self.takes_ms = takes_ms
        self.waits = waits

    def process_record(self, context, record):
        RAN[type(self).__name__ if self.output is None else self.output] += 1
        if self.takes_ms:
            CLOCKS[-1].advance_ms(self.takes_ms)
        if self.waits:
            assert GATE.wait(60)
        if self.output is None:
            context.state.set((context.state.get() or 0) + record.value["n"])
        else:
            context.produce(self.output, {"n": record.value["n"]})


class Pond:
    """A store in memory that outlives its runs."""

    def __init__(self, pipeline: Callable[[], EnginePipeline], **options: Any) -> None:
        self.pipeline = pipeline
        self.options = options
        self.clock = ManualClock()
        self.disk = FaultyObjects(MemoryObjects())
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)
        CLOCKS.append(self.clock)
        RAN.clear()
        GATE.clear()

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self) -> LocalRun:
        runner = LocalRunner(
            self.store(), clock=self.clock, rng=self.rng, progress=False, upkeep=None, **self.options
        )
        return runner.start(self.pipeline(), stepping=True)

    def counts(self, computation: str) -> dict[str, int]:
        with self.store() as store:
            rows = store.rows_view(computation).to_arrow().to_pylist()
        return {row["key"]: int(row["state"]) for row in rows if row["state"] is not None}

    def files(self, computation: str) -> int:
        return sum(f"computation={computation}/" in path for path in self.disk.list("") if "_log" not in path)


def chain(
    *,
    b_takes_ms: float = 0,
    c_waits: bool = False,
    c_timeout: str | None = None,
    sink: str | None = None,
    modes: tuple[str, str] = ("weak", "weak"),
) -> Callable[[], EnginePipeline]:
    """Chain ``in`` → ``a`` → ``b`` → ``c``; ``c`` counts."""

    def make() -> EnginePipeline:
        pipeline = EnginePipeline("p")
        stream = pipeline.inject("in", key="k", at="t").apply(
            Pass("s"), name="a", produces="s", productions=modes[0]
        )
        stream = stream.apply(Pass("m", b_takes_ms), name="b", produces="m", productions=modes[1])
        if sink is not None:
            stream.sink("out", DeltaSink(sink))
        stream.apply(Pass(waits=c_waits), name="c", user_code_timeout=c_timeout)
        return pipeline

    return make


def rows(*numbers: int) -> list[dict[str, object]]:
    return [{"k": f"k{n}", "t": n, "n": n} for n in numbers]


def test_weak_productions_reach_their_consumers_in_one_superstep():
    """The stateless computations write no files."""
    pond = Pond(chain(), intervals=2)
    with pond.start() as run:
        run.inject("in", rows(1, 2, 3))
        run.step()
        assert run.step() is None
        produced = run.summary().run.productions

    assert pond.counts("c") == {"k1": 1, "k2": 2, "k3": 3}
    assert produced == 6
    assert pond.files("a") == pond.files("b") == 0


def test_weak_and_strong_streams_can_be_mixed():
    """Each strong stream takes one more superstep."""
    steps = {}
    for modes in (("strong", "strong"), ("weak", "strong"), ("strong", "weak"), ("weak", "weak")):
        pond = Pond(chain(modes=modes), intervals=3)
        with pond.start() as run:
            run.inject("in", rows(1, 2, 3))
            run.run_until_quiet()
            steps[modes] = run.summary().superstep
        assert pond.counts("c") == {"k1": 1, "k2": 2, "k3": 3}

    assert sorted(steps.values()) == [1, 2, 2, 3]


@pytest.mark.parametrize("restarts", [False, True])
def test_production_that_waits_too_long_is_checkpointed(restarts):
    """Figure 11 of the MillWheel paper: ``b`` takes over a second, so ``c`` reads the checkpoint."""
    pond = Pond(chain(b_takes_ms=1_500), intervals=2)
    run = pond.start()
    receipt = run.inject("in", rows(7))
    run.step()
    if restarts:
        run.stop()
        run = pond.start()

    assert receipt.is_durable
    assert RAN["Pass"] == 0
    run.run_until_quiet()
    run.stop()
    assert pond.counts("c") == {"k7": 7}
    assert RAN == {"s": 1, "m": 1, "Pass": 1}


def test_checkpointed_production_holds_its_consumers_watermark():
    pond = Pond(chain(b_takes_ms=1_500))
    with pond.start() as run:
        run.inject("in", rows(7))
        run.finish("in")
        run.step()
        assert run.watermark("c") == 7
        run.run_until_quiet()
        assert run.watermark("c") > 7


def test_checkpointed_production_goes_to_slow_consumers_only():
    def make() -> EnginePipeline:
        pipeline = EnginePipeline("p")
        stream = pipeline.inject("in", key="k", at="t").apply(
            Pass("s"), name="a", produces="s", productions="weak"
        )
        stream.apply(Pass("fast", takes_ms=1_500), name="b", produces="fast")
        stream.apply(Pass(), name="c")
        return pipeline

    pond = Pond(make)
    with pond.start() as run:
        run.inject("in", rows(1, 2))
        run.run_until_quiet()

    assert RAN == {"s": 2, "fast": 2, "Pass": 2}
    assert pond.counts("c") == {"k1": 1, "k2": 2}


def test_hanging_consumer_does_not_delay_the_receipt():
    """The production is checkpointed while ``c`` hangs."""
    pond = Pond(chain(c_waits=True))
    clock = SystemClock()
    with Store.in_memory(objects=pond.disk, registry=pond.registry, clock=clock, rng=pond.rng) as store:
        runner = LocalRunner(store, progress=False, checkpoint_weak_after="50ms")
        with runner.start(pond.pipeline()) as run:
            receipt = run.inject("in", rows(5))
            assert receipt.wait("60s")
            assert not GATE.is_set()
            GATE.set()
            assert run.run_until_quiet(timeout="1m")
            assert run.summary().superstep == 2

    assert pond.counts("c") == {"k5": 5}
    # The finished work became part of the next superstep, so the code did not run again.
    assert RAN["Pass"] == 1


def test_consumer_that_blocks_indefinitely_ends_the_run():
    """The abandoned thread cannot be interrupted, but it is a daemon, so the process can exit."""
    before = set(threading.enumerate())
    pond = Pond(chain(c_waits=True, c_timeout="100ms"))
    with Store.in_memory(
        objects=pond.disk, registry=pond.registry, clock=SystemClock(), rng=pond.rng
    ) as store:
        runner = LocalRunner(store, progress=False, upkeep=None, checkpoint_weak_after="50ms")
        with pytest.raises(InvalidError, match=r"exceeds its time limit.*`c`.*`k5`"):
            runner.run(pond.pipeline(), {"in": rows(5)})
    started = set(threading.enumerate()) - before
    left = [thread for thread in started if thread.name.startswith("millpond-weak")]
    assert [thread.daemon for thread in left] == [True]
    GATE.set()
    left[0].join(60)

    assert pond.counts("c") == {}


def test_sink_gets_weak_productions_once(tmp_path):
    """The sink reads them from the committed rows, also after a crash."""
    pond = Pond(chain(sink=str(tmp_path / "out")))
    run = pond.start()
    run.inject("in", rows(1, 2))
    run.step()
    run.stop()
    pond.start().stop()

    assert sorted(DeltaTable(tmp_path / "out").to_pyarrow_table()["key"].to_pylist()) == ["k1", "k2"]
    assert pond.counts("c") == {"k1": 1, "k2": 2}


def test_failed_commit_reverts_consumers_of_weak_productions():
    """Their code has already run."""
    pond = Pond(chain(), pause_timeout="0s")
    run = pond.start()
    run.inject("in", rows(9))
    run.step()
    pond.disk.plan(Fault.REFUSED, "put_if_absent", within="_delta_log", times=1_000)
    run.inject("in", rows(1))
    with pytest.raises(OutcomeUnknownError):
        run.step()
    run.abandon()
    pond.disk.heal()
    assert RAN["Pass"] == 2
    assert pond.counts("c") == {"k9": 9}

    with pond.start() as again:
        again.inject("in", rows(1))
        again.run_until_quiet()

    assert RAN["Pass"] == 3
    assert pond.counts("c") == {"k1": 1, "k9": 9}


def test_productions_delivered_as_weak_are_not_delivered_again_as_strong(tmp_path):
    sink = str(tmp_path / "out")
    pond = Pond(chain(sink=sink))
    run = pond.start()
    run.inject("in", rows(3))
    run.step()
    run.stop()
    pond.pipeline = chain(sink=sink, modes=("strong", "strong"))
    with pond.start() as again:
        again.run_until_quiet()

    assert pond.counts("c") == {"k3": 3}
