"""A year of a store: what grows with its age.

The real engine runs on a folder under a clock that advances a year in a number of supersteps, half a minute each if
they are a million. Guests come and go by timers, some records become dead letters, which are dropped each day, an append sink
and an upsert sink get rows, a savepoint is made each day and dropped two days later, a reader holds a version for twenty
minutes a day, and the run is started again each day; once a month there are many short runs. Upkeep and retention are
as by default. Each month is a row of figures. A store of one day and the store of a year are copied to moto's S3
server, where a proxy counts requests. All but the processor's time are counts, so a busy machine measures as well.

    python -m benchmarks.year --supersteps 1000000 --folder build/year --json build/bench/year.json
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.json_result import tell_result
from benchmarks.requests import CLOCK, Bucket, copy_table, count_requests
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.computation.timers import Timer
from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.executor.superstep.letter_retries import LetterSelection, ask_for_letters, stored_letters
from millpond.executor.time.watermark_policies import BoundedDisorder
from millpond.statestore.catalog.catalog import Reading
from millpond.statestore.errors import InternalError, check
from millpond.statestore.history.replayed_log import replay_log
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemRng
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.processes.usage import usage_of
from millpond.testing.servers.s3_proxy import S3Proxy
from millpond.testing.servers.s3_server import S3Server, s3_options

MONTHS: Final = 12
_DAYS_A_MONTH: Final = 30
_DAYS: Final = MONTHS * _DAYS_A_MONTH
_DAY_S: Final = 86_400
_STAY_US: Final = 21_600_000_000
_READ_S: Final = 1_200
_SHORT_RUNS: Final = 20
# Rounds of garbage collection come from the 64th version of a run on.
_RUN_MIN: Final = 100
_FIRST_RUN: Final = 32
_RETENTION_MS: Final = UpkeepPolicy().kept.keep_ms
_SINK_RETENTION_MS: Final = 7 * _DAY_S * 1_000
_SINKS: Final = ("sink_append", "sink_upsert")


class Visit(Computation):
    """Keeps the last visit of a resident, and that of a guest until it leaves."""

    def process_record(self, context: Context, record: Record) -> None:
        number = record.value["n"]
        if number % 211 == 0:
            raise ValueError(number)
        context.state.set({"n": number, "text": hashlib.shake_128(str(number).encode()).hexdigest(150)})
        if record.value["guest"]:
            context.set_timer(record.at + _STAY_US)
        elif number % 8 == 0:
            context.produce("visits", {"n": number}, key=f"room-{number % 500}")

    def process_timer(self, context: Context, _timer: Timer) -> None:
        number = context.state.get()["n"]
        context.state.delete()
        context.produce("visits", {"n": number}, key=f"room-{number % 500}")


def year_pipeline(place: str, options: Mapping[str, str] | None = None) -> EnginePipeline:
    """Return a pipeline of visits, with two sinks in a folder."""
    pipeline = EnginePipeline("year")
    arrivals = pipeline.inject("arrivals", key="key", at="at", id="id", watermark=BoundedDisorder("1s"))
    visits = arrivals.apply(Visit(), name="visits")
    visits.sink("all", DeltaSink(f"{place}/{_SINKS[0]}", storage_options=options))
    latest = DeltaSink(f"{place}/{_SINKS[1]}", storage_options=options, mode="upsert", keys=["key"])
    visits.sink("latest", latest)
    return pipeline


def visit(key: str, at: int, number: int, *, guest: bool = False) -> dict[str, Any]:
    return {"key": key, "at": at, "id": f"{key}/{number}", "n": number, "guest": guest}


class OpenedFiles:
    """The number of files and folders that this process has opened; one object counts for all."""

    def __init__(self) -> None:
        self.number = 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _arguments: object) -> None:
        if event in {"open", "os.listdir", "os.scandir"}:
            self.number += 1

    def count(self, action: Callable[[], object]) -> int:
        before = self.number
        action()
        return self.number - before


OPENED: Final = OpenedFiles()


@dataclass(slots=True)
class Year:
    """A store on disk, and the pipeline that lives through a year."""

    folder: Path
    supersteps: int
    residents: int
    began_us: int
    days_begun: int = 0
    months: list[dict[str, Any]] = field(default_factory=list)
    clock: ManualClock = field(init=False)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    rng: SeededRng = field(init=False)
    store: Store = field(init=False)
    run: LocalRun = field(init=False)
    _number: int = 0
    _run_supersteps: int = 0
    _opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.clock = ManualClock(self.began_us)

    @property
    def _diary(self) -> Path:
        return self.folder / "year.json"

    def resume(self) -> None:
        """Go on with the day after the one in which an earlier process ended."""
        if self._diary.exists():
            diary = json.loads(self._diary.read_text())
            if (diary["supersteps"], diary["residents"]) != (self.supersteps, self.residents):
                raise click.UsageError(
                    f"{self.folder} has a year of other supersteps or residents: give those"
                )
            self.began_us, self.days_begun, self.months = (
                diary["began_us"],
                diary["days_begun"],
                diary["months"],
            )

    def _note(self) -> None:
        names = ("supersteps", "residents", "began_us", "days_begun", "months")
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self._diary.with_suffix(".new")
        new.write_text(json.dumps({name: getattr(self, name) for name in names}))
        new.replace(self._diary)

    @property
    def a_day(self) -> int:
        return self.supersteps // _DAYS

    @property
    def step_s(self) -> float:
        return _DAY_S / self.a_day

    def open(self) -> Store:
        return Store.open(
            self.folder / "pond",
            clock=self.clock,
            leases=lambda _, writer: MemoryLeases(self.registry, self.clock, writer_id=writer),
        )

    def _start(self, store: Store, *, stepping: bool) -> LocalRun:
        runner = LocalRunner(store, clock=self.clock, progress=False, dead_letter_limit=None)
        return runner.start(year_pipeline(str(self.folder)), stepping=stepping)

    def start(self) -> None:
        self._run_supersteps = 0
        self._opened = ExitStack()
        self.store = self._opened.enter_context(self.open())
        self.run = self._opened.enter_context(self._start(self.store, stepping=True))

    def stop(self) -> None:
        self._opened.close()

    def settle(self) -> None:
        """Start with all residents."""
        self.start()
        now_us = self.clock.now_us()
        names = [f"resident-{number:06d}" for number in range(self.residents)]
        self.run.inject("arrivals", [visit(name, now_us, 1 + 211 * at) for at, name in enumerate(names)])
        self.run.run_until_quiet()

    def _arrivals(self) -> list[dict[str, Any]]:
        self.clock.advance_ms(self.step_s * 1_000)
        self._number += 1
        now_us, number = self.clock.now_us(), self._number
        rows = [visit(f"resident-{int(self.rng.random() * self.residents):06d}", now_us, number)]
        if number % 8 == 1:
            rows.append(visit(f"guest-{number}", now_us, number, guest=True))
        return rows

    def day(self, day: int) -> None:
        """Live through a day; the clock begins it where it is, if an earlier process has not ended the day before."""
        behind_us = self.began_us + day * _DAY_S * 1_000_000 - self.clock.now_us()
        self.clock.advance_ms(max(0, behind_us) / 1_000)
        self.days_begun, self._number = day + 1, 2 * day * self.a_day
        self.rng = SeededRng(day)
        self._note()
        if self._run_supersteps >= _RUN_MIN:
            self.stop()
            if day % _DAYS_A_MONTH >= _DAYS_A_MONTH // 2 > (day - 1) % _DAYS_A_MONTH:
                self._short_runs()
            self.start()
        self.store.savepoint(f"day {day}")
        for savepoint in self.store.savepoints()[:-2]:
            self.store.drop_savepoint(savepoint.name)
        if any(stored_letters(self.store.committer.snapshot, self.store.objects)):
            ask_for_letters(self.store, "drop", LetterSelection())
        held = max(1, round(_READ_S / self.step_s))
        self._steps(self.a_day // 2)
        self._read_slowly(held)
        self._steps(self.a_day - self.a_day // 2 - held)

    def _steps(self, supersteps: int) -> None:
        self._run_supersteps += supersteps
        for _ in range(supersteps):
            self.run.inject("arrivals", self._arrivals())
            self.run.step()

    def _read_slowly(self, supersteps: int) -> None:
        catalog = self.store.catalog
        if catalog is None:
            raise InternalError("a store on disk has a catalog")
        with Reading(catalog, "a slow reader", self.store.committer.snapshot.version) as reading:
            keys = self._keys(reading.version)
            for _ in range(supersteps):
                self._steps(1)
                reading.renew()
            check(self._keys(reading.version) == keys, "a version stays as it is while it is read")

    def _keys(self, version: int) -> list[str]:
        keys: list[str] = self.store.rows_view("visits", version).to_arrow(["key"])["key"].to_pylist()
        return keys

    def _short_runs(self) -> None:
        for _ in range(_SHORT_RUNS):
            with self.open() as store, self._start(store, stepping=False) as run:
                run.inject("arrivals", self._arrivals()).wait()

    def end_month(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Note and return the figures of a month."""
        self.months.append({**known, **self.look()})
        self._note()
        return self.months[-1]

    def look(self) -> dict[str, Any]:
        """Return the present figures; the run is started again to count what that reads."""
        rows, now_ms = self.folder / "pond" / "rows", self.clock.now_us() // 1_000
        sizes = sizes_in(rows.parent)
        others = [path for path in sizes if not path.startswith(("rows/computation", "rows/_delta_log"))]
        figures: dict[str, Any] = {
            "version": self.store.committer.snapshot.version,
            "txns": len(self.store.committer.snapshot.txns),
            **table_figures(rows, now_ms - _RETENTION_MS),
            "other_files": len(others),
            "other_bytes": sum(sizes[path] for path in others),
        }
        for sink in _SINKS:
            of_sink = table_figures(self.folder / sink, now_ms - _SINK_RETENTION_MS)
            figures |= {f"{sink}_{name}": value for name, value in of_sink.items()}
        self.stop()
        # Commits since the last checkpoint are read, and that many are new.
        last = max((known.version for known in self.store.log.inventory().checkpoints), default=-1)
        figures["new_entries"] = (self.store.log.latest_version() or 0) - last
        figures["opening_files"] = OPENED.count(self._read)
        figures["start_files"] = OPENED.count(self.start)
        gc.collect()
        usage = usage_of(os.getpid())
        return figures | {
            "memory_mib": round(usage.memory_mib),
            "threads": usage.threads,
            "descriptors": usage.descriptors,
        }

    def _read(self) -> None:
        Store.open(self.folder / "pond", create=False, read_only=True, clock=self.clock).close()


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the sizes of the files below a folder, by path."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*"):
        # A thread replaces marks meanwhile.
        with suppress(FileNotFoundError):
            if path.is_file():
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes


def table_figures(folder: Path, before_ms: int) -> dict[str, Any]:
    """Return the files and bytes of a table; garbage is what no savepoint keeps and was replaced before a time."""
    sizes = sizes_in(folder)
    log = Log(open_objects(str(folder)))
    newest = replay_log(log, log.latest_version() or TableVersion(0))
    kept = {path for path, gone in newest.removes.items() if gone.deletion_time_ms > before_ms}
    for savepoint in open_savepoints(newest.snapshot.txns):
        kept |= replay_log(log, savepoint.version).adds.keys()
    data = {path: size for path, size in sizes.items() if not path.startswith("_")}
    stale = {path: size for path, size in data.items() if path not in newest.adds and path not in kept}
    live = sum(add.size_bytes for add in newest.adds.values())
    kinds = Counter(path.rpartition(".")[2] for path in sizes if path.startswith("_delta_log/"))
    return {
        "live_files": len(newest.adds),
        "files": len(data),
        "live_bytes": live,
        "bytes": sum(sizes.values()),
        "stale_files": len(stale),
        "disk_ratio": round(1 + sum(stale.values()) / live, 2) if live else 1.0,
        "entries": kinds["json"],
        "checkpoints": kinds["parquet"],
        "checkpoint_bytes": max((size for path, size in sizes.items() if ".checkpoint." in path), default=0),
    }


def live_through(
    year: Year, months: int, told: Callable[[str], object] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """Live through some months, and yield the figures after the first day and after each month."""
    yield from year.months
    if year.days_begun:
        year.start()
    else:
        year.settle()
        year.day(0)
        yield year.end_month({"month": 0})
    for month in range(len(year.months), months + 1):
        used_s, opened, version = _processor_s(), OPENED.number, year.store.committer.snapshot.version
        days = range(year.days_begun, month * _DAYS_A_MONTH + 1)
        for day in days:
            year.day(day)
            told(f"day {day} of {_DAYS}")
        made = len(days) * year.a_day
        costs = {
            "versions_per_superstep": round((year.store.committer.snapshot.version - version) / made, 2),
            "files_per_superstep": round((OPENED.number - opened) / made, 2),
            "processor_ms": round((_processor_s() - used_s) * 1_000 / made, 2),
        }
        yield year.end_month({"month": month, **costs})


def _processor_s() -> float:
    times = os.times()
    return times.user + times.system


def measure_on_s3(year: Year, server: S3Server, proxy: S3Proxy, supersteps: int) -> dict[str, Any]:
    """Copy the store to a bucket, and count the requests of a process that goes on there."""
    bucket = Bucket(f"s3://{server.make_bucket(SystemRng().token())}", proxy, MemoryRegistry())
    for table in ("pond/rows", *_SINKS):
        copy_table(
            open_objects(str(year.folder / table)), open_objects(f"{bucket.url}/{table}", server.options)
        )
    bucket.open(adopt="moved").close()
    pipeline = year_pipeline(bucket.url, s3_options(proxy.address))
    numbers = (8 * number for number in range(1, 1 << 40) if number % 211)

    def inject(run: LocalRun) -> Receipt:
        number = next(numbers)
        return run.inject("arrivals", [visit(f"s3-{number % 5}", CLOCK.now_us(), number)])

    # A store on disk writes a checkpoint more rarely: the first run on S3 leaves one.
    with bucket.running(pipeline) as run:
        for _ in range(_FIRST_RUN):
            inject(run).wait()
    return count_requests(bucket, pipeline, inject, supersteps)


@click.command()
@click.option("--supersteps", default=1_000_000, show_default=True, help="The supersteps of a year.")
@click.option("--residents", default=20_000, show_default=True, help="Keys that stay.")
@click.option("--months", default=MONTHS, show_default=True, help="Stop after so many months.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where the store is kept: the same command goes on with a year that was interrupted. Else a temporary folder.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result to a file.")
def main(supersteps: int, residents: int, months: int, folder: Path | None, json_path: Path | None) -> None:
    """Let a store live through a year, and show what has grown."""
    logging.getLogger("millpond").setLevel(logging.ERROR)
    figures: dict[str, Any] = {"supersteps": supersteps // _DAYS * _DAYS, "residents": residents}
    with (
        S3Server(CLOCK) as server,
        S3Proxy(server.port, CLOCK) as proxy,
        tempfile.TemporaryDirectory(prefix="millpond-year-") as temporary,
    ):
        place = folder or Path(temporary)
        year = Year(place / "year", supersteps, residents, CLOCK.now_us() - _DAYS * _DAY_S * 1_000_000)
        year.resume()
        for month in live_through(year, months, lambda line: click.echo(f"{line}  \r", nl=False, err=True)):
            click.echo(month, err=True)
        year.stop()
        figures |= {"months": year.months, "s3_of_a_year": measure_on_s3(year, server, proxy, 48)}
        new = Year(Path(temporary, "day"), supersteps, residents, CLOCK.now_us() - _DAY_S * 1_000_000)
        for _ in live_through(new, 0):
            new.stop()
        figures["s3_of_a_day"] = measure_on_s3(new, server, proxy, 48)
        tell_result(figures, json_path, indent=2)


if __name__ == "__main__":
    main()
