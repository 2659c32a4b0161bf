"""Operators and other engines, as faults: folders that are copied, backups that are put back, foreign commits.

What they do is tried on a fork of the world: the present disks, in which nothing else happens meanwhile. Each
trial derives the required refusals and successes from the names and the plain JSON of the files alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import orjson

from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.sinks.delta_table import take_back_sink
from millpond.statestore.errors import DataError, InvalidError, MillpondError
from millpond.statestore.history.lineage import Adoption, adopt_store
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Objects, Rng, Superstep, WallTimeMicros
from millpond.testing.fixtures.determinism import SeededRng
from millpond.testing.fixtures.guest import add_guest
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.fault import OPERATOR_FAULTS
from millpond.testing.simulation.reader import live_files, superstep_of
from millpond.testing.simulation.sink import simulate_sinks
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import Workload
from millpond.testing.simulation.world import FOLDER, ROWS, World

_TRIAL: Final = 0.015
_BACKUP: Final = 0.05
_STEPS: Final = 6
_SINK: Final = "millpond/sink/"
_SUPERSTEP: Final = "millpond/superstep/"
_FOREIGN: Final = ("RESTORE", "DELETE", "UPDATE", "MERGE", "WRITE")


@dataclass(slots=True)
class _Fork:
    """Copies of the world's disks at a moment, and a lease service that knows nothing else."""

    disks: dict[str, MemoryObjects]
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)

    @property
    def rows(self) -> MemoryObjects:
        """The disk of the store's table."""
        return self.disks[ROWS]

    def sinks(self) -> dict[str, MemoryObjects]:
        """The disks of the sinks."""
        return {name: disk for name, disk in self.disks.items() if name not in (ROWS, FOLDER)}

    def disk_of_sink(self, name: str) -> MemoryObjects:
        """The disk of a sink, an empty one if the fork has none of it."""
        return self.disks.setdefault(name, MemoryObjects(name))


class _Clock:
    """The world's time; waiting passes only here."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slept_us = 0

    def now_us(self) -> WallTimeMicros:
        return WallTimeMicros(self._world.now_us + self._slept_us)

    def monotonic_us(self) -> int:
        return int(self.now_us())

    def sleep_ms(self, duration_ms: float) -> None:
        self._slept_us += int(duration_ms * 1_000)


class Operators:
    """Copies, backups and other engines, each tried now and then.

    Args:
        world: the world that they fork.
        workload: what runs in a trial.
        row_format: the encoding of row files.
    """

    def __init__(self, world: World, workload: Workload, row_format: RowFormat) -> None:
        self._world = world
        self._workload = workload
        self._row_format = row_format
        self._draw = Draw(f"{world.seed}/operators")
        self._clock = _Clock(world)
        self._trials = 0
        self._backup: _Fork | None = None

    def act(self) -> None:
        """Perhaps try one; call it while no process is in a turn."""
        swarm = self._world.swarm
        trials = {
            "store_copied": self._copied,
            "backup_restored": self._restored,
            "foreign_commit": self._foreign,
        }
        for kind in OPERATOR_FAULTS:
            if not swarm.knows(kind) or not swarm.active or _latest(self._world.disk(ROWS)) < 1:
                continue
            if kind == "backup_restored" and self._draw.chance(_BACKUP):
                self._backup = self._fork()
            if self._draw.chance(_TRIAL):
                swarm.struck[kind] += 1
                self._trials += 1
                self._world.tell("operator", kind)
                trials[kind]()

    # -- a folder is copied, and run next to its original ----------------------------------------

    def _copied(self) -> None:
        fork = self._fork()
        copy = _Fork({**fork.disks, ROWS: _copy(fork.rows, "/world/copy")})
        sinks = {name: _contents(disk) for name, disk in fork.sinks().items()}
        error = self._refusal(copy)
        must(error is not None, "I2", "a copied store does not go on as its original")
        self._adopt(copy, "copy")
        if any(_delivered(disk) for disk in fork.sinks().values()):
            error = self._refusal(copy)
            must(error is not None, "I2", "a copy does not write into the sinks of its original")
        own = _Fork({ROWS: copy.rows, FOLDER: copy.disks[FOLDER]}, copy.registry)
        with self._running(own) as run:
            _steps(run)
        same = all(_contents(fork.disks[name]) == before for name, before in sinks.items())
        must(same, "I2", "a copy leaves the sinks of its original alone")

    def check_fork(self, rows: Objects) -> None:
        """Check that a fork of the store does not write into the sinks of its original.

        Args:
            rows: the fork's table, which is copied before it is run.
        """
        fork = self._fork()
        fork.disks |= {ROWS: _copy(rows), FOLDER: MemoryObjects(FOLDER)}
        if any(_delivered(disk) for disk in fork.sinks().values()):
            error = self._refusal(fork)
            # Not only where the sinks are ahead of it, which would be a `DataError`.
            is_told = isinstance(error, InvalidError)
            must(is_told, "I2", "a fork does not write into the sinks of its original", error=error)
        own = _Fork({ROWS: fork.rows, FOLDER: fork.disks[FOLDER]}, fork.registry)
        error = self._refusal(own)
        must(error is None, "I12", "a fork runs with sinks of its own", error=error)

    # -- a backup is put back --------------------------------------------------------------------

    def _restored(self) -> None:
        backup, now = self._backup, self._fork()
        if backup is None:
            return
        rows, at = backup.rows, _latest(backup.rows)
        # With new sinks, so that nothing but the mark knows better.
        partly = _Fork({ROWS: _copy(rows), FOLDER: _copy(now.disks[FOLDER])})
        if _marked(now.disks[FOLDER]) > at:
            must(self._refusal(partly) is not None, "I11", "a table behind its mark is refused", version=at)
        whole = _Fork({**now.disks, ROWS: _copy(rows), FOLDER: _copy(backup.disks[FOLDER])})
        superstep = _superstep_of(rows)
        ahead = {name: disk for name, disk in whole.sinks().items() if _delivered(disk) > superstep}
        error = self._refusal(whole)
        told = {name: _delivered(disk) for name, disk in ahead.items()}
        must(
            (error is not None) == bool(ahead), "I2", "a store is refused where a sink is ahead of it", **told
        )
        if ahead:
            self._take_over(whole, ahead, superstep)

    def _take_over(self, fork: _Fork, ahead: Mapping[str, MemoryObjects], superstep: int) -> None:
        """Adopt the backup, revert the sinks, and continue: what runs again counts once."""
        before = {name: set(live_files(disk)) for name, disk in ahead.items()}
        self._adopt(fork, "restored")
        must(self._refusal(fork) is not None, "I2", "an adopted backup is refused by sinks ahead of it")
        with self._store(fork) as store:
            lineage, pipeline = store.lineage, self._workload.pipeline().check().name
            for disk in ahead.values():
                take_back_sink(disk, lineage, {pipeline: Superstep(superstep)}, self._clock, self._rng())
        for name, disk in ahead.items():
            left = {path for path in before[name] if superstep_of(path) <= superstep}
            must(
                set(live_files(disk)) == left,
                "I2",
                "what the backup has not seen goes out of the sink",
                sink=name,
            )
        with self._running(fork) as run:
            _steps(run)
        for disk in ahead.values():
            supersteps = [superstep_of(path) for path in set(live_files(disk))]
            must(len(supersteps) == len(set(supersteps)), "I2", "a superstep is in the sink once")

    # -- another engine commits ------------------------------------------------------------------

    def _foreign(self) -> None:
        fork = self._fork()
        if not _known_adds(fork.rows):
            # The log that named the live files was cleaned up.
            return
        with ExitStack() as resources:
            self._check_tidying(fork)
            run = resources.enter_context(self._running(fork)) if self._draw.chance(0.5) else None
            operation = self._draw.choice(_FOREIGN)
            version = self._commit(fork.rows, operation, data_change=operation != "RESTORE")
            if run is not None:
                self._must_refuse(lambda: self._go_on(run), operation, version, "a pipeline that runs")
            self._must_refuse(lambda: self._start(fork), operation, version, "a pipeline that starts")
            must(
                _latest(fork.rows) == version, "I11", "nothing is built on a foreign change", version=version
            )
        found = [finding.fault for finding in verify_store(fork.rows).findings]
        must(any(operation in fault for fault in found), "I11", "verify names a foreign change", found=found)

    def _check_tidying(self, fork: _Fork) -> None:
        if self._draw.chance(0.5):
            self._commit(fork.rows, "OPTIMIZE", data_change=False)
            error = self._refusal(fork)
            must(error is None, "I12", "what other engines tidy up is no change of data", error=error)

    def _commit(self, disk: MemoryObjects, operation: str, *, data_change: bool) -> int:
        """Let another engine take one file away and, unless it deletes, put it back in the same commit."""
        version, adds = _latest(disk) + 1, _known_adds(disk)
        path = self._draw.choice(sorted(adds))
        gone = {"path": path, "deletionTimestamp": 0, "dataChange": data_change}
        lines: list[dict[str, Any]] = [{"commitInfo": {"operation": operation, "engineInfo": "Stranger/1"}}]
        lines.append({"remove": gone})
        if operation != "DELETE":
            lines.append({"add": {**adds[path], "dataChange": data_change}})
        disk.put_if_absent(commit_path(version), b"\n".join(map(orjson.dumps, lines)))
        return version

    def _go_on(self, run: LocalRun) -> None:
        stream, row = self._workload.record(self._draw, 0)
        run.inject(stream, [{**row, "id": f"trial-{self._trials}", "at": self._world.now_us}])
        _steps(run)

    def _must_refuse(self, action: Callable[[], object], operation: str, version: int, who: str) -> None:
        try:
            action()
        except DataError as error:
            named = error.details.get("operation") == operation and error.details.get("version") == version
            must(named, "I11", "a foreign change is named", error=error, operation=operation, version=version)
            return
        raise Violation("I11", f"{who} refuses a foreign change: {operation} at version {version}")

    # -- forks -----------------------------------------------------------------------------------

    def _fork(self) -> _Fork:
        self._world.disk(FOLDER)
        return _Fork({name: _copy(disk) for name, disk in self._world.disks.items()})

    def _rng(self) -> Rng:
        return SeededRng(f"{self._world.seed}/trial-{self._trials}-{self._draw.number(0, 1 << 30)}")

    def _refusal(self, fork: _Fork) -> MillpondError | None:
        """What a pipeline that starts on a fork is refused with; ``None`` if it starts."""
        try:
            self._start(fork)
        except MillpondError as error:
            return error
        return None

    def _start(self, fork: _Fork) -> None:
        with self._running(fork):
            pass

    def _adopt(self, fork: _Fork, adoption: Adoption) -> None:
        log, leases = Log(fork.rows), self._leases(fork)
        adopt_store(log, fork.rows.url, adoption, leases, self._clock, self._rng(), marks=fork.disks[FOLDER])
        fork.registry = MemoryRegistry()

    def _leases(self, fork: _Fork) -> Callable[[str, str], MemoryLeases]:
        return lambda _, writer_id: MemoryLeases(fork.registry, self._clock, writer_id=writer_id)

    @contextmanager
    def _store(self, fork: _Fork) -> Iterator[Store]:
        with (
            ExitStack() as resources,
            Store(
                fork.rows.url,
                fork.rows,
                storage_options={},
                clock=self._clock,
                rng=self._rng(),
                leases=self._leases(fork),
                catalog_url=None,
                resources=resources,
                row_format=self._row_format,
                marks=fork.disks[FOLDER],
                mark_thread=False,
            ) as store,
        ):
            yield store

    @contextmanager
    def _running(self, fork: _Fork) -> Iterator[LocalRun]:
        pipeline = self._workload.pipeline()
        add_guest(pipeline, is_here=False)
        simulate_sinks(pipeline, fork.disk_of_sink, SystemClock(), SeededRng(0))
        with self._store(fork) as store:
            runner = LocalRunner(store, progress=False, upkeep=None, clock=self._clock, rng=self._rng())
            with runner.start(pipeline, stepping=True) as run:
                yield run


def _steps(run: LocalRun) -> None:
    for _ in range(_STEPS):
        run.step()


# ------------------------------------------------------------------ the plain content of the files


class _ForkDisk(MemoryObjects):
    """A disk of a fork, at its original's place, or at another one."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._place = url

    @property
    def url(self) -> str:
        return self._place


def _copy(disk: Objects, place: str | None = None) -> MemoryObjects:
    copied = _ForkDisk(place or disk.url)
    for path, data in _contents(disk).items():
        copied.put(path, data)
    return copied


def _contents(disk: Objects) -> dict[str, bytes]:
    return {path: disk.get(path) for path in disk.list("")}


def _commits(disk: Objects) -> list[str]:
    return [path for path in disk.list("_delta_log") if path.endswith(".json")]


def _latest(disk: Objects) -> int:
    return max((int(path[11:31]) for path in _commits(disk)), default=-1)


def _actions(disk: MemoryObjects) -> list[dict[str, Any]]:
    return [orjson.loads(line) for path in _commits(disk) for line in disk.get(path).splitlines()]


def _superstep_of(rows: MemoryObjects) -> int:
    txns = load(Log(rows)).txns
    return max((at for app_id, at in txns.items() if app_id.startswith(_SUPERSTEP)), default=0)


def _delivered(sink: MemoryObjects) -> int:
    """The last superstep that a sink's table has; nothing cleans up the log of one."""
    txns = (action["txn"] for action in _actions(sink) if "txn" in action)
    last = {txn["appId"]: txn["version"] for txn in txns if txn["appId"].startswith(_SINK)}
    return max(last.values(), default=0)


def _known_adds(rows: MemoryObjects) -> dict[str, dict[str, Any]]:
    """The live files that a commit still names, as it names them."""
    live = {file.path for file in load(Log(rows)).files}
    named = {action["add"]["path"]: action["add"] for action in _actions(rows) if "add" in action}
    return {path: add for path, add in named.items() if unquote(path) in live}


def _marked(disk: MemoryObjects) -> int:
    return max((int(path.rpartition("/")[2][:20]) for path in disk.list("high_water")), default=-1)
