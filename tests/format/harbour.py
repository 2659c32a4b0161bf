"""The pipeline of the checked-in stores, which uses every feature that a store records.

Later versions continue stores of earlier ones, so this pipeline never changes. New features of stores go
into a separate pipeline beside this one.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.time.watermark_policies import ManualWatermark
from millpond.executor.windows.combiners import Count, Sum
from millpond.executor.windows.composite_triggers import AfterEach
from millpond.executor.windows.count_triggers import AfterCount
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.time_triggers import AfterWatermark, WatermarkPercentile
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.rows.codec import BytesCodec, MsgpackCodec
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

MINUTE_US: Final = 60_000_000
HOUR_US: Final = 60 * MINUTE_US
STORE: Final = "store"
"""Name of the store's folder."""

START_US: Final = 1_704_067_200_000_000
"""Minute 0 in event time: 2024-01-01T00:00:00Z."""

_NO_TRACEBACK: Final = "-" * 10_000
"""Leaves no room in a dead letter for the traceback, which names the folders of the machine that writes."""

_LEAVES_AFTER_US: Final = 10 * MINUTE_US
_INSPECTED_AFTER_US: Final = 72 * HOUR_US


def minute(number: int) -> int:
    """Return the time so many minutes after the first, in microseconds."""
    return START_US + number * MINUTE_US


class Visits(Computation):
    """JSON state; an event timer reset by each record, a wall timer, and no negative loads."""

    def process_record(self, context: Context, record: Record) -> None:
        state = context.state.get({"visits": 0, "tons": 0, "left": 0, "inspected": 0})
        state["visits"] += 1
        state["tons"] += record.value["tons"]
        context.state.set(state)
        context.set_timer(record.at + _LEAVES_AFTER_US, "leave")
        context.set_timer(context.wall_time + _INSPECTED_AFTER_US, "inspect", "wall", holds=True)
        if record.value["tons"] < 0:
            raise ValueError(f"a ship cannot bring less than nothing\n{_NO_TRACEBACK}")

    def process_timer(self, context: Context, timer: Timer) -> None:
        state = context.state.get()
        context.state.set({**state, "left" if timer.tag == "leave" else "inspected": 1})
        if timer.tag == "leave":
            context.produce("departures", {"port": "north", "ship": context.key, "tons": state["tons"]})


class Tally(Computation):
    """JSON state; a count of productions."""

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


class Manifest(Computation):
    """MessagePack state, with keys that are numbers and values that are bytes."""

    codec = MsgpackCodec()

    def process_record(self, context: Context, record: Record) -> None:
        number, tons = record.value["number"], record.value["tons"]
        context.state.set({**context.state.get({}), number: f"{tons} t".encode()})


class Seals(Computation):
    """Bytes as state, one per record."""

    codec = BytesCodec()

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(b"") + bytes([record.value["number"]]))


class Customs(Computation):
    """Holds the time of its first record until the ship is cleared; then its row is deleted."""

    def process_record(self, context: Context, record: Record) -> None:
        if record.value["cleared"]:
            context.state.delete()
        elif context.state.get() is None:
            context.state.set("waits")
            context.state.hold(record.at)


class Harbour:
    """A store, its two sinks, and the clock, leases and names of its writers.

    Args:
        folder: holds the store, in `STORE`, and next to it the sinks.
        now_us: the wall time.
        seed: of file names; a writer that continues a store needs another seed.
    """

    def __init__(self, folder: Path, now_us: int = START_US, *, seed: str = "harbour") -> None:
        self.folder = folder
        self.clock = ManualClock(now_us)
        self.rng = SeededRng(seed)
        self._registry = MemoryRegistry()

    def open(self) -> Store:
        """Open the store for writing, and create it if it is missing."""
        return Store.open(self.folder / STORE, leases=self.leases, clock=self.clock, rng=self.rng)

    def start(self, store: Store, upkeep: UpkeepPolicy | None = None) -> LocalRun:
        """Start the pipeline; the caller steps it."""
        runner = LocalRunner(
            store, upkeep=upkeep, progress=False, clock=self.clock, rng=self.rng, dead_letter_limit=None
        )
        return runner.start(self.pipeline(), stepping=True)

    def pack_catalog(self) -> None:
        """Replace the catalog by its SQL text, which is a fifth of SQLite's file and can be reviewed."""
        with closing(sqlite3.connect(self._catalog)) as database:
            text = "\n".join(database.iterdump())
        self._catalog.with_suffix(".sql").write_text(f"{text}\n", encoding="utf-8")
        self._catalog.unlink()

    def unpack_catalog(self) -> None:
        """Create the catalog from its text."""
        text = self._catalog.with_suffix(".sql").read_text(encoding="utf-8")
        with closing(sqlite3.connect(self._catalog)) as database:
            database.executescript(text)

    @property
    def _catalog(self) -> Path:
        return self.folder / STORE / "catalog.sqlite"

    def pipeline(self) -> Pipeline:
        pipeline = Pipeline("harbour")
        arrivals = pipeline.inject("arrivals", key="ship", at="at", id="id", watermark=ManualWatermark())
        departures = arrivals.apply(Visits(), name="visits", produces="departures", retries=0)
        departures.apply(Tally(), name="tally", key="port")
        arrivals.apply(Manifest(), name="manifests")
        arrivals.apply(Seals(), name="seals")
        arrivals.apply(Customs(), name="customs")
        trigger = AfterWatermark(early=AfterCount(2))
        windows = arrivals.window(FixedWindows("10m"), trigger=trigger, accumulation="retracting", of="tons")
        berths = windows.combine(Sum(), name="berths")
        tiers = AfterEach(WatermarkPercentile(50), WatermarkPercentile(100))
        sorted_out = arrivals.window(FixedWindows("10m"), trigger=tiers, accumulation="accumulating")
        counts = sorted_out.combine(Count(), name="tiers")
        departures.sink("departures", self._sink("departures"))
        berths.sink("berths", self._sink("berths", mode="upsert"))
        counts.sink("tiers", self._sink("tiers"))
        return pipeline

    def _sink(self, name: str, **options: Any) -> DeltaSink:
        return DeltaSink(str(self.folder / name), **options)

    def leases(self, _store_id: str, writer_id: str) -> MemoryLeases:
        return MemoryLeases(self._registry, self.clock, writer_id=writer_id)
