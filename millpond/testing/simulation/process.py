"""A simulated process: the real local runner over simulated disks, leases and clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.coordinator import Coordinator
from millpond.statestore.errors import ConflictError, MillpondError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import TIMEOUT_MS, Lease, OnHeld
from millpond.statestore.leases.memory import MemoryLeases
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MAX_US, Sequencer
from millpond.testing.fixtures.cuts import random_cut
from millpond.testing.fixtures.determinism import SeededRng
from millpond.testing.fixtures.guest import add_guest
from millpond.testing.simulation.chance import Draw, ProcessClock
from millpond.testing.simulation.disk import DISK_FAULTS, PLANNED_BY_NEMESIS, PlannedFault, simulated_disk
from millpond.testing.simulation.sink import simulate_sinks
from millpond.testing.simulation.violation import Violation
from millpond.testing.simulation.world import FOLDER, ROWS, Crash, World

_CALLS_BEFORE_MAX: Final = 24
_FILE_CALLS_BEFORE_MAX: Final = 60
_FAILPOINTS_BEFORE_MAX: Final = 30
_SESSION_MS: Final = 10_000
_STANDBY_ROUNDS: Final = 8
_STANDBY_MS: Final = 2_000
_MARKED: Final = 0.5
_KEYS_CUT: Final = 0.25
_UPDATED: Final = 0.25
_HERE: Final = 0.5
_TURN_US_MAX: Final = 3_600_000_000


@dataclass(frozen=True, slots=True)
class Message:
    """A message from a publisher to a process.

    Attributes:
        stream: the injected stream.
        rows: records to inject.
        numbers: the records' numbers, to be acknowledged.
        promise: a watermark: no older record will follow, or no record at all (`TIME_MAX_US`);
            ``None`` for no promise.
        rewinds: how often the store had been rewound when it was sent.
    """

    stream: str
    rows: tuple[dict[str, Any], ...] = ()
    numbers: tuple[int, ...] = ()
    promise: int | None = None
    rewinds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the processes of a world run their pipeline.

    Attributes:
        intervals: key intervals per computation.
        upkeep: compactions and garbage collection.
        cache_mib: row cache, in MiB.
        pause_timeout: how long a process waits for an unavailable service.
        row_format: the encoding of row files.
        id_slack_ms: how long publishers may repeat a record.
    """

    intervals: int
    upkeep: UpkeepPolicy
    cache_mib: int
    pause_timeout: str
    row_format: RowFormat
    id_slack_ms: int = 60_000


class SimulatedProcess:
    """One process: started, taking turns, and stopped or killed in the end.

    Args:
        world: the world it lives in.
        name: unique in the world.
        make_pipeline: declares its pipeline; sinks into Delta tables use disks of the world.
        settings: how it runs the pipeline.
        on_held: its reaction to leases that another process holds.
    """

    def __init__(
        self,
        world: World,
        name: str,
        make_pipeline: Callable[[], EnginePipeline],
        settings: Settings,
        on_held: OnHeld = "take",
    ) -> None:
        self.world = world
        self.name = name
        self.clock: ProcessClock = ProcessClock(lambda: world.now_us, self._sleep)
        self.last_words: str = ""
        self.leases: _Leases = _Leases(world.registry, self.clock, writer_id=name)
        self.leases.stand_by = self._stand_by
        self.inbox: deque[Message] = deque()
        self.is_dead: bool = False
        self.ended_by: BaseException | None = None
        self.store_away_until_us: int = 0
        self.born_us: int = world.now_us
        self._make_pipeline = make_pipeline
        self._settings = settings
        self._on_held = on_held
        self._rng = SeededRng(f"{world.seed}/{name}")
        self._run: LocalRun | None = None
        self._store: Store | None = None
        self._marks = Draw(f"{world.seed}/{name}/marks")
        self._cuts = Draw(f"{world.seed}/{name}/cuts")
        self._updates = Draw(f"{world.seed}/{name}/updates")
        self._rests = False
        self._planned: list[PlannedFault] = []
        self._dies_after: int | None = None
        self._turn_began_us = world.now_us
        self._receipts: deque[tuple[Receipt, Message]] = deque()
        self.acknowledge: Callable[[Message], None] = _discard

    @property
    def is_busy(self) -> bool:
        """Whether one of its turns is in progress, at any depth."""
        return self in self.world.turns

    @property
    def is_alive(self) -> bool:
        """Return True if it can take turns."""
        return not self.is_dead

    # -- turns -----------------------------------------------------------------------------

    def turn(self) -> None:
        """Start the run, or inject arrived records and run a superstep; errors end the process, not the world."""
        world = self.world
        self._plan_faults()
        self._turn_began_us = world.now_us
        world.turns.append(self)
        try:
            if self._run is None:
                self._run = self._start()
                world.tell(self.name, "has started")
            else:
                self._take_in(self._run)
                self._cut_keys(self._run._worker.coordinator)  # noqa: SLF001 - as its balancer would
                self._update(self._run)
                report = self._run.step()
                self._rests = report is None
                world.tell(self.name, "rests" if report is None else f"superstep {report.superstep}")
        except Crash:
            pass
        except Violation:
            raise
        except Exception as error:  # noqa: BLE001 - what may end a process is for the simulation to judge
            self._end(error)
        finally:
            world.turns.pop()
            self._planned.clear()
        self.tell_what_is_durable()
        # A thread of the process writes it, sooner or later.
        if self.is_alive and self._store is not None and self._marks.chance(_MARKED):
            self._store.keep_mark()

    def tell_what_is_durable(self) -> None:
        """Send publishers durable receipts at once, even during a turn, as a thread of the process would."""
        while self.is_alive and self._receipts and self._receipts[0][0].is_durable:
            self.acknowledge(self._receipts.popleft()[1])

    def stop(self) -> None:
        """Stop in order, returning the leases."""
        self._turn_began_us = self.world.now_us
        self.world.turns.append(self)
        try:
            if self._run is not None:
                self._run.stop()
        except Crash:
            pass
        except MillpondError as error:
            self.world.tell(self.name, f"stopping failed: {type(error).__name__}")
        finally:
            self.world.turns.pop()
        self._bury("has stopped")

    def die(self, where: str) -> None:
        """Die immediately; only within its turn."""
        self.kill(where)
        raise Crash

    def kill(self, where: str) -> None:
        """Be killed from outside; the lease session ends later."""
        if self.is_alive:
            self._bury(f"dies {where}")
            self.world.later(_SESSION_MS, self.leases.expire_session)

    def must_live(self) -> None:
        """End the turn of a process that has died in the meantime."""
        if self.is_dead:
            raise Crash

    def maybe_die(self, failpoint: str) -> None:
        """Die at this failpoint if that was planned."""
        if self._dies_after is not None:
            self._dies_after -= 1
            if self._dies_after < 0:
                self._dies_after = None
                self.die(f"at {failpoint}")

    def next_fault(self, operation: str) -> str | None:
        """The fault of the current call; ``None`` for none."""
        for planned in self._planned:
            if operation in DISK_FAULTS[planned.kind]:
                planned.calls_before -= 1
                if planned.calls_before < 0:
                    self._planned.remove(planned)
                    return planned.kind
        return None

    def _plan_faults(self) -> None:
        swarm, draw = self.world.swarm, self.world.draw
        self._planned += [
            PlannedFault(kind, draw.number(0, _CALLS_BEFORE_MAX))
            for kind in DISK_FAULTS
            if kind not in PLANNED_BY_NEMESIS and swarm.strikes(kind)
        ]

    def plan_crash(self) -> None:
        """Plan a death at one of the calls of its next turn, if it makes that many."""
        self._planned.append(PlannedFault("crash", self.world.draw.number(0, _CALLS_BEFORE_MAX)))

    def plan_file_fault(self, kind: str) -> None:
        """Plan a death, or a power cut, at one of the calls to the file system of its next turn."""
        self._planned.append(PlannedFault(kind, self.world.draw.number(0, _FILE_CALLS_BEFORE_MAX)))

    def plan_crash_at_failpoint(self) -> None:
        """Plan a death at one of the failpoints that it reaches next."""
        self._dies_after = self.world.draw.number(0, _FAILPOINTS_BEFORE_MAX)

    def _take_in(self, run: LocalRun) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if message.rows:
                self._receipts.append((run.inject(message.stream, list(message.rows)), message))
            if message.promise == TIME_MAX_US:
                run.finish(message.stream)
            elif message.promise is not None:
                run.advance_watermark(message.stream, message.promise)

    def _cut_keys(self, coordinator: Coordinator) -> None:
        world, draw = self.world, self._cuts
        if not world.swarm.active or not world.swarm.knows("keys_cut") or not draw.chance(_KEYS_CUT):
            return
        cut = None if self._store is None else random_cut(coordinator, self._store, draw.number)
        if cut is not None:
            world.swarm.struck["keys_cut"] += 1
            coordinator.recut(cut)
            world.tell(self.name, f"{cut.kind}: {[interval.app_id for interval in cut.by]}")

    def _update(self, run: LocalRun) -> None:
        world = self.world
        if (
            not world.swarm.active
            or not world.swarm.knows("pipeline_updated")
            or not self._updates.chance(_UPDATED)
        ):
            return
        world.swarm.struck["pipeline_updated"] += 1
        done = run.update(self._pipeline())
        world.tell(self.name, f"updates its pipeline in version {done.version}: {done.change}")

    def _end(self, error: Exception) -> None:
        if self.is_alive:
            self.ended_by = error
            self._bury(f"has ended: {type(error).__name__}: {error}")
            self.world.later(_SESSION_MS, self.leases.expire_session)

    def _bury(self, how: str) -> None:
        self.is_dead = True
        self.last_words = how
        self._run = None
        self.inbox.clear()
        self.world.tell(self.name, how)

    def _sleep(self, duration_ms: float) -> None:
        self.must_live()
        self.world.pass_time(duration_ms)
        self.must_live()
        lasted_us = self.world.now_us - self._turn_began_us
        if lasted_us > _TURN_US_MAX:
            self.world.break_promise(Violation("I12", f"a turn of {self.name} does not end"))

    def _stand_by(self, rounds: int) -> None:
        if rounds == _STANDBY_ROUNDS:
            self.die("as a standby that nobody needs any more")
        self.world.pause(self)
        self._sleep(_STANDBY_MS)

    # -- birth -----------------------------------------------------------------------------

    def _start(self) -> LocalRun:
        self._store = self._open_store()
        runner = LocalRunner(
            self._store,
            intervals=self._settings.intervals,
            cache_mib=self._settings.cache_mib,
            pause_timeout=self._settings.pause_timeout,
            on_held=self._on_held,
            upkeep=self._settings.upkeep,
            progress=False,
            # The poison of a seed is in so few records that a superstep may have no others.
            dead_letter_limit=None,
            clock=self.clock,
            rng=self._rng,
        )
        return runner.start(self._pipeline(), stepping=True)

    def _open_store(self) -> Store:
        disk = simulated_disk(self.world, self, ROWS)
        if Log(disk).latest_version() is None:
            create_rows_table(Log(disk), self.clock, self._rng, location=disk.url)
        return Store(
            disk.url,
            disk,
            storage_options={},
            clock=self.clock,
            rng=self._rng,
            leases=lambda _store_id, _writer_id: self.leases,
            catalog_url=None,
            resources=ExitStack(),
            row_format=self._settings.row_format,
            marks=self.world.disk(FOLDER),
            mark_thread=False,
        )

    def _pipeline(self) -> EnginePipeline:
        pipeline = self._make_pipeline()
        if self.world.swarm.knows("pipeline_updated"):
            add_guest(pipeline, is_here=self._updates.chance(_HERE))
        simulate_sinks(pipeline, lambda sink: simulated_disk(self.world, self, sink), self.clock, self._rng)
        injectors = pipeline._injectors  # noqa: SLF001 - publishers give up earlier than real ones
        for stream, injector in injectors.items():
            injectors[stream] = replace(injector, id_slack_us=self._settings.id_slack_ms * 1_000)
        return pipeline

    # -- in peace --------------------------------------------------------------------------

    @property
    def sequencer(self) -> int | None:
        """The highest sequencer that its lease on the pipeline ever had; ``None`` before it held any."""
        return self.leases.highest

    @property
    def is_at_rest(self) -> bool:
        """Return True if its last turn found no work and nothing has arrived since."""
        return self._rests and not self.inbox

    def next_wall_timer(self) -> int | None:
        """When its next wall timer is due, by its own clock, in microseconds."""
        return None if self._run is None else self._run._worker.coordinator.next_wall_timer()  # noqa: SLF001

    def forgive(self) -> None:
        """End all faults: services answer, and lease notices arrive."""
        self.store_away_until_us = 0
        self._dies_after = None
        self._planned.clear()
        self.leases.resume()
        self.leases.deliver_notices()


def _discard(_message: Message) -> None:
    return


class _Leases(MemoryLeases):
    """Leases that remember the highest sequencer of their pipeline's own interval, and let others act while they wait for a holder."""

    highest: int | None = None
    stand_by: Callable[[int], None]

    def take_all(
        self,
        intervals: Mapping[Interval, Sequencer],
        *,
        on_held: OnHeld = "take",
        timeout_ms: float = TIMEOUT_MS,
    ) -> tuple[Lease, ...]:
        if on_held == "wait":
            taken = self._wait(intervals)
        else:
            taken = super().take_all(intervals, on_held=on_held, timeout_ms=timeout_ms)
        # That of the pipeline's own interval: successors of intervals that were cut have higher ones.
        own = (lease.sequencer for lease in taken if lease.interval.computation == DEAD_LETTERS)
        self.highest = max([self.highest or 0, *own])
        return taken

    def _wait(self, intervals: Mapping[Interval, Sequencer]) -> tuple[Lease, ...]:
        # A standby waits indefinitely; here the wait is one turn of the only thread, so the holder must act in it.
        rounds = 0
        while True:
            try:
                return super().take_all(intervals, on_held="refuse")
            except ConflictError:
                self.stand_by(rounds)
                rounds += 1
