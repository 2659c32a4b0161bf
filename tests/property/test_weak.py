"""Weak productions under every timing and restart."""

from __future__ import annotations

from collections import Counter

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import OutcomeUnknownError, UnavailableError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.store import Store
from millpond.testing.faults.faulty_objects import Fault, FaultyObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

MODES = st.sampled_from(["strong", "weak"])
ENDS = st.sampled_from(["goes on", "stops", "is killed", "is killed before the commit"])


class JumpingClock(ManualClock):
    """A clock whose consecutive reads may be two seconds apart."""

    def __init__(self, jumps_ms: list[int]) -> None:
        super().__init__()
        self._jumps_ms = jumps_ms
        self._looks = 0

    def monotonic_us(self) -> int:
        """Return the last time plus the next jump."""
        self._looks += 1
        self.advance_ms(self._jumps_ms[self._looks % len(self._jumps_ms)])
        return super().monotonic_us()


class Spread(Computation):
    """Produces each record twice, under other keys."""

    def __init__(self, output: str) -> None:
        self.output = output

    def process_record(self, context: Context, record: Record) -> None:
        n = record.value["n"]
        for part in ("x", "y"):
            context.produce(
                self.output, {"n": n, "path": record.value.get("path", "") + part}, key=f"{part}{n % 3}"
            )


class Keep(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set([*context.state.get([]), f"{record.value['n']}{record.value['path']}"])


def pipeline(modes: tuple[str, str, str]) -> EnginePipeline:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="t", id="n")
    for name, source, mode in zip("abc", ("in", "a", "b"), modes, strict=True):
        made.add(Spread(name), name=name, subscribes={source: None}, produces=(name,), productions=mode)  # type: ignore[arg-type]
    made.add(Keep(), name="keep", subscribes={"c": None})
    made.add(Keep(), name="both", subscribes={"a": None, "b": None}, exactly_once=False)
    return made


def expected(count: int, *depths: int) -> Counter[str]:
    """Return the expected contents after ``count`` records and the given numbers of spreads."""
    counts: Counter[str] = Counter()
    for depth in depths:
        paths = [""]
        for _ in range(depth):
            paths = [path + part for path in paths for part in ("x", "y")]
        counts.update(f"{n}{path}" for n in range(count) for path in paths)
    return counts


class Pond:
    """A store in memory, and consecutive runs on it."""

    def __init__(self, made: EnginePipeline, jumps_ms: list[int], intervals: int) -> None:
        self.made = made
        self.clock = JumpingClock(jumps_ms)
        self.disk = FaultyObjects(MemoryObjects())
        self.registry = MemoryRegistry()
        self.rng = SeededRng(1)
        self.intervals = intervals

    def store(self) -> Store:
        return Store.in_memory(objects=self.disk, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self) -> LocalRun:
        runner = LocalRunner(
            self.store(),
            clock=self.clock,
            rng=self.rng,
            progress=False,
            dead_letter_limit=None,
            intervals=self.intervals,
            pause_timeout="0s",
            upkeep=None,
        )
        return runner.start(self.made, stepping=True)

    def kept(self, computation: str) -> Counter[str]:
        """Return all records that any key has kept."""
        with self.store() as store:
            return Counter(
                load
                for row in store.rows_view(computation).to_arrow().to_pylist()
                for load in orjson.loads(row["state"])
            )


@given(
    modes=st.tuples(MODES, MODES, MODES),
    jumps_ms=st.lists(st.integers(0, 2_000), min_size=1, max_size=12),
    ends=st.lists(ENDS, min_size=4, max_size=4),
    intervals=st.integers(1, 3),
)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_each_record_counts_once_whatever_is_late(
    modes: tuple[str, str, str], jumps_ms: list[int], ends: list[str], intervals: int
) -> None:
    """Modes are mixed, productions late, and the process restarted or killed after any step."""
    pond = Pond(pipeline(modes), jumps_ms, intervals)
    run = pond.start()
    run.inject_durably("in", row(0))
    for number, end in enumerate(ends, 1):
        if end.startswith("is killed"):
            # The commit's reply is lost, or the commit is never made.
            fault = Fault.LOST if end == "is killed" else Fault.REFUSED
            pond.disk.plan(fault, "put_if_absent", within="_delta_log", times=1_000)
        run = step(pond, run, number, end)
    run.run_until_quiet(supersteps_max=200)
    run.stop()

    assert pond.kept("keep") == expected(len(ends) + 1, 3)
    assert pond.kept("both") == expected(len(ends) + 1, 1, 2)


def row(number: int) -> list[dict[str, object]]:
    """Return the record with this number."""
    return [{"k": f"k{number}", "t": number, "n": number}]


def step(pond: Pond, run: LocalRun, number: int, end: str) -> LocalRun:
    """Inject a record, run one superstep, and end the process; its publisher repeats unacknowledged rows."""
    run.inject("in", row(number))
    try:
        run.step()
    except (OutcomeUnknownError, UnavailableError):
        run.abandon()
        pond.disk.heal()
        again = pond.start()
        again.inject_durably("in", row(number))
        return again
    pond.disk.heal()
    if end == "goes on":
        return run
    run.stop()
    return pond.start()
