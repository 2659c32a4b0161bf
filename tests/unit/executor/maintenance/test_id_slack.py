"""The time for which compactions keep record ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.nodes import OnLate
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.foreach_batch import foreach_batch
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.durations import Duration, duration_us
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.record_ids import ID_SLACK_US
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

HOUR_US: Final = 3_600_000_000
MINUTE_MS: Final = 60_000
NOW_US: Final = 500_000 * HOUR_US
EAGER: Final = UpkeepPolicy(
    compaction=CompactionPolicy(fan_in=2, files_max=2, garbage_ratio=1e-9), collect_every=1_000
)


class Total(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


class Pond:
    """A store in memory that is compacted as often as possible, and a count of one key's records."""

    def __init__(
        self, id_slack: Duration = "3h", *, on_late: OnLate = "process", upkeep: UpkeepPolicy | None = EAGER
    ) -> None:
        self.clock = ManualClock(NOW_US)
        self._objects, self._registry = MemoryObjects(), MemoryRegistry()
        self._on_late = on_late
        self._upkeep = upkeep
        self.start(id_slack)

    def start(self, id_slack: Duration) -> None:
        made = EnginePipeline("p")
        made.inject("in", key="k", at="at", id="id", watermark=ManualWatermark(), id_slack=id_slack).apply(
            Total(), name="total", on_late=self._on_late
        )
        self.store = self.open()
        runner = LocalRunner(
            self.store, clock=self.clock, rng=SeededRng(str(id_slack)), progress=False, upkeep=self._upkeep
        )
        self.run = runner.start(made, stepping=True)

    def open(self) -> Store:
        return Store.in_memory(
            objects=self._objects, registry=self._registry, clock=self.clock, rng=SeededRng("store")
        )

    def stop(self) -> None:
        self.run.stop()
        self.store.close()

    def send(self, id_: str, at: int = NOW_US, *, times: int = 1) -> None:
        for _ in range(times):
            self.run.inject("in", [{"k": "key", "id": id_, "at": at}])
            self.run.step()

    def pass_minutes(self, minutes: int) -> None:
        self.clock.advance_ms(minutes * MINUTE_MS)
        for number in range(4):
            self.run.inject(
                "in", [{"k": "other", "id": f"{self.clock.now_us()} {number}", "at": self.clock.now_us()}]
            )
            self.run.step()

    @property
    def count(self) -> int:
        rows = self.store.rows_view("total").to_arrow().to_pylist()
        return sum(int(row["state"]) for row in rows if row["key"] == "key")

    @property
    def totals(self) -> Any:
        return self.run.summary().totals


def test_record_from_a_fast_clock_does_not_expire_ids_of_others() -> None:
    """One record is nine hours ahead; 120 others are sent twice."""
    pond = Pond()
    pond.send("fast", NOW_US + 9 * HOUR_US)
    pond.run.advance_watermark("in", NOW_US + 9 * HOUR_US)
    for number in range(120):
        pond.send(f"honest {number}", NOW_US + number)
    for number in range(120):
        pond.send(f"honest {number}", NOW_US + number)

    assert pond.count == 1 + 120
    assert pond.totals.duplicates == 120


def test_repeated_late_record_counts_once() -> None:
    """The record is nine hours behind the watermark and repeated every ten commits."""
    pond = Pond()
    pond.run.advance_watermark("in", NOW_US)
    for number in range(40):
        if number % 10 == 0:
            pond.send("late", NOW_US - 9 * HOUR_US)
        pond.send(f"other {number}")

    assert pond.count == 40 + 1
    assert pond.totals.duplicates == 3


def test_repeated_late_record_is_dropped_once() -> None:
    """Compactions run between the repetitions."""
    pond = Pond(on_late="drop")
    pond.run.advance_watermark("in", NOW_US)
    for number in range(5):
        pond.send("late", NOW_US - 9 * HOUR_US)
        pond.send(f"other {number}", times=3)

    assert (pond.totals.dropped, pond.totals.late) == (1, 1)
    assert pond.totals.duplicates == 4 + 5 * 2


@pytest.mark.parametrize(
    ("id_slack", "wall_minutes", "event_hours", "counts"),
    [
        ("3h", 179, 100, 1),
        ("3h", 182, 100, 2),
        ("3h", 1_000, 2, 1),
        ("1h", 62, 2, 2),
        ("1d", 23 * 60, 100, 1),
    ],
)
def test_id_expires_when_its_slack_has_passed_on_both_clocks(
    id_slack: str, wall_minutes: int, event_hours: int, counts: int
) -> None:
    """Arrivals are rounded up by a minute."""
    pond = Pond(id_slack)
    pond.send("again")
    pond.run.advance_watermark("in", NOW_US + event_hours * HOUR_US)
    pond.pass_minutes(wall_minutes)
    pond.send("again")

    assert pond.count == counts


@pytest.mark.parametrize("first", ["1d", "1h"])
def test_offline_gc_keeps_ids_for_the_slack_of_the_last_run(first: str) -> None:
    """The store keeps the slack, also if an earlier run had a shorter one."""
    pond = Pond(first, upkeep=None)
    pond.stop()
    for id_slack, minutes, expected in (("5h", 4 * 60, 1), ("2h", 2 * 60 + 2, 2)):
        pond.start(id_slack)
        pond.send("again")
        assert pond.count == 1
        pond.run.advance_watermark("in", NOW_US + 100 * HOUR_US)
        pond.pass_minutes(0)
        pond.stop()
        pond.clock.advance_ms(minutes * MINUTE_MS)
        with pond.open() as store:
            collect_offline(store, pond.clock, SeededRng(id_slack), UpkeepPolicy())
        pond.start(id_slack)
        pond.send("again")
        assert pond.count == expected
        pond.stop()


def test_id_slack_must_be_positive_and_defaults_to_3_hours() -> None:
    made = EnginePipeline("p")
    made.inject("default", key="k", at="at", id="id")
    with pytest.raises(InvalidError, match="id_slack must be positive"):
        made.inject("none", key="k", at="at", id="id", id_slack=0)
    with pytest.raises(InvalidError, match="say where they are with id="):
        made.inject("none", key="k", at="at", id_slack="9h")

    assert made._injectors["default"].id_slack_us == ID_SLACK_US == duration_us("3h")


def test_computation_uses_the_longest_slack_of_its_streams() -> None:
    """A stream without ids does not count."""
    made = EnginePipeline("p")
    made.inject("short", key="k", at="at", id="id", id_slack="1h")
    made.inject("long", key="k", at="at", id="id", id_slack="2h")
    made.inject("plain", key="k", at="at")
    made.add(Total(), name="total", subscribes={"short": None, "long": None, "plain": None})

    assert made.check().id_slack_us("total") == 2 * HOUR_US


def test_foreach_batch_takes_id_slack(tmp_path: Path) -> None:
    embedded = foreach_batch(tmp_path, Total(), key="k", at="at", id="id", id_slack="10m", name="total")

    assert embedded._embedded.pipeline.check().id_slack_us("total") == HOUR_US // 6
