"""
A simulation: one seed, from an empty disk to a quiescent end.

The safety phase: actors and faults take turns at random. The liveness phase: no more faults, and
everything must drain (I12). Finally everything is compared with the records that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.names import control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.gc.compaction_plan import CompactionPolicy
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.failpoint import listening
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.statestore.types import TIME_MAX_US
from millpond.testing.simulation.auditor import Auditor
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.operators import Operators
from millpond.testing.simulation.process import Message, Settings, SimulatedProcess
from millpond.testing.simulation.publisher import ID_SLACK_MS, ID_SLACK_MS_LATE, Publisher
from millpond.testing.simulation.reader import read_end, read_states
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import Workload
from millpond.testing.simulation.world import World

__all__ = ["STEPS", "Simulation", "SimulationOutcome", "simulate"]

STEPS: Final = 300
"""Steps of the safety phase, unless said otherwise."""

_DRAIN_ROUNDS_MAX: Final = 400
_RETENTION_MS: Final = 20_000
_PROCESSES_MAX: Final = 3
_PARQUET: Final = 0.05
_WEIGHTS: Final = {"turn": 1.0, "publish": 3.0, "promise": 1.5, "time": 4.0, "nemesis": 3.0, "read": 0.08}
_TURN_OF_THE_DOOMED: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """
    The outcome of a seed.

    Attributes:
        seed: the seed.
        violation: the broken promise in words; empty if all held.
        promise: the number of the broken promise.
        trace_hash: hash over the trace.
        events: number of events in the trace.
        supersteps: number of committed supersteps.
        kinds: kinds of faults that were enabled.
        struck: number of faults by kind.
        failpoints: number of passes by failpoint.
        processes: number of processes started.
        simulated_s: seconds of the world's time.
        deaths_left: planned deaths whose failpoint no process reached.
        tail: the last events, if a promise was broken.
    """

    seed: int | str
    violation: str = ""
    promise: str = ""
    trace_hash: str = ""
    events: int = 0
    supersteps: int = 0
    kinds: tuple[str, ...] = ()
    struck: dict[str, int] = field(default_factory=dict)
    failpoints: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    simulated_s: float = 0.0
    deaths_left: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()


class Simulation:
    """
    A world with its processes, publishers and auditor.

    Args:
        seed: the source of randomness.
        workload: the workload to run.
        steps: steps of the safety phase.
        kinds: kinds of faults to enable; ``None`` lets the seed decide.
        deaths: failpoints at which processes die, one after another.
    """

    def __init__(
        self,
        seed: int | str,
        workload: Workload,
        *,
        steps: int = STEPS,
        kinds: Iterable[str] | None = None,
        deaths: Iterable[str] = (),
    ) -> None:
        self.world: World = World(seed, kinds, deaths)
        self.processes: list[SimulatedProcess] = []
        self._workload = workload
        workload.has_late_records = workload.takes_late_records and self.world.swarm.knows("fast_clock")
        workload.begin(Draw(f"{seed}/workload"))
        self._steps = steps
        self._topology: Topology = workload.pipeline().check()
        self.auditor: Auditor = Auditor(self.world, workload, self._topology)
        self.publisher: Publisher = Publisher(self.world, workload, self._topology.injectors, self._alive)
        self._settings = self._draw_settings()
        self._operators = Operators(self.world, workload, self._settings.row_format)
        self.world.landed = self.auditor.landed
        self.world.others_act = self._others_act
        self.world.all_die = self._all_die

    def run(self) -> SimulationOutcome:
        """
        Run all phases.
        """
        world = self.world
        with listening(world.reached):
            try:
                self._safety()
                self._liveness()
                self._end()
            except Violation as violation:
                world.violations.append(violation)
        # Report the first violation: later ones may be its consequences.
        first = world.violations[0] if world.violations else None
        text, promise = (str(first), first.promise) if first else ("", "")
        return SimulationOutcome(
            seed=world.seed,
            violation=text,
            promise=promise,
            trace_hash=world.trace.digest,
            events=world.trace.events,
            supersteps=self.auditor.kinds.get("superstep", 0),
            kinds=world.swarm.kinds,
            struck=dict(world.swarm.struck),
            failpoints=dict(world.failpoints),
            processes=len(self.processes),
            simulated_s=(world.now_us - self.auditor.landed_us.get(0, world.now_us)) / 1e6,
            deaths_left=tuple(world.deaths),
            tail=tuple(world.trace.last) if text else (),
        )

    def _draw_settings(self) -> Settings:
        world = self.world
        draw, knows = world.draw, world.swarm.knows
        world.swarm.struck.update(kind for kind in ("no_cache", "eager_upkeep") if knows(kind))
        fan_in = 2 if knows("eager_upkeep") else draw.choice((5, 8))
        upkeep = UpkeepPolicy(
            compaction=CompactionPolicy(fan_in=fan_in, files_max=8),
            retention=0 if knows("eager_upkeep") else f"{_RETENTION_MS}ms",
            collect_every=8 if knows("eager_upkeep") else 24,
        )
        return Settings(
            intervals=draw.choice((1, 1, 2)),
            upkeep=upkeep,
            cache_mib=0 if knows("no_cache") else 1,
            pause_timeout_ms=draw.choice((300, 60_000)),
            # Parquet would double the cost, and its encoding is tested on files, not on schedules.
            row_format=PARQUET if Draw(f"{world.seed}/format").chance(_PARQUET) else IpcRowFormat(),
            id_slack_ms=ID_SLACK_MS_LATE if self._workload.has_late_records else ID_SLACK_MS,
        )

    # -- the safety phase ------------------------------------------------------------------

    def _safety(self) -> None:
        acts: dict[str, Callable[[], None]] = {
            "turn": self._turn,
            "publish": self.publisher.publish,
            "promise": self.publisher.promise,
            "time": self._time,
            "nemesis": self._nemesis,
            "read": self._read,
        }
        # A process with a planned death must get to its failpoint.
        weights = _WEIGHTS | ({"turn": _TURN_OF_THE_DOOMED} if self.world.deaths_planned else {})
        for _ in range(self._steps):
            if self.world.deaths_planned and not self.world.deaths:
                return
            acts[self.world.draw.weighted(weights)]()
            self._operators.act()

    def _alive(self) -> list[SimulatedProcess]:
        return [process for process in self.processes if process.is_alive]

    def _all_die(self, how: str) -> None:
        for process in self._alive():
            process.kill(how)

    def _turn(self) -> None:
        ready = [process for process in self._alive() if not process.is_busy]
        if not self._alive():
            ready = [self._bear()]
        if ready:
            self._let(self.world.draw.choice(ready))

    def _let(self, process: SimulatedProcess) -> None:
        process.turn()
        if process.ended_by is not None:
            self._judge(process, process.ended_by)
            process.ended_by = None

    def _bear(self, on_held: str | None = None) -> SimulatedProcess:
        draw = self.world.draw
        chosen = on_held or draw.weighted({"take": 0.7, "wait": 0.2, "refuse": 0.1})
        name = f"process-{len(self.processes)}"
        process = SimulatedProcess(
            self.world,
            name,
            self._workload.pipeline,
            self._settings,
            on_held=chosen,  # type: ignore[arg-type]
        )
        process.acknowledge = self.publisher.acknowledge
        self.processes.append(process)
        self.world.tell(name, f"is born, to {chosen}")
        return process

    def _time(self) -> None:
        self.world.pass_time(self.world.draw.number(10, 3_000))

    def _others_act(self) -> None:
        draw = self.world.draw
        for _ in range(draw.number(1, 5)):
            act = draw.choice((self._turn, self._turn, self._time, self.publisher.publish, self._takeover))
            act()

    def _takeover(self) -> None:
        if self.world.swarm.knows("second_owner") and len(self._alive()) < _PROCESSES_MAX:
            self._let(self._bear("take"))

    def _read(self) -> None:
        """
        A reader reads a random version within the retention.
        """
        if self.auditor.version < 0:
            return
        oldest = self.auditor.oldest_readable(0 if self.world.swarm.knows("eager_upkeep") else _RETENTION_MS)
        if self.world.swarm.knows("clock_jump") or self.world.swarm.knows("clock_drift"):
            oldest = self.auditor.version
        version = self.world.draw.number(oldest, self.auditor.version)
        self._check_cut(version)
        self.world.tell("reader", f"has read version {version}")

    def _check_cut(self, version: int) -> None:
        try:
            states = read_states(self.world, self._topology, version)
        except DataError as error:
            raise Violation("I10", f"version {version} cannot be read any more: {error}") from error
        self._workload.check_cut(version, states)

    # -- the nemesis -----------------------------------------------------------------------

    def _nemesis(self) -> None:
        world = self.world
        blows: dict[str, Callable[[SimulatedProcess], None]] = {
            "crash": lambda process: process.plan_crash(),
            "crash_in_write": lambda process: process.plan_file_fault("crash_in_write"),
            "power_cut": lambda process: process.plan_file_fault("power_cut"),
            "crash_at_failpoint": lambda process: process.plan_crash_at_failpoint(),
            "lease_suspended": self._suspend,
            "session_expired": lambda process: process.leases.expire_session(),
            "news_held": lambda process: process.leases.hold_notices(),
            "registry_wiped": lambda _: world.registry.wipe(),
            "second_owner": lambda _: self._takeover(),
            "restart": self._restart,
            "clock_jump": self._jump,
            "clock_drift": self._drift,
        }
        known = [kind for kind in blows if world.swarm.knows(kind)]
        alive = self._alive()
        if not known or not alive:
            return
        kind = world.draw.choice(known)
        if world.swarm.strikes(kind):
            victim = world.draw.choice(alive)
            world.tell("nemesis", f"{kind} {victim.name}")
            blows[kind](victim)

    def _suspend(self, process: SimulatedProcess) -> None:
        process.leases.suspend()
        self.world.later(self.world.draw.number(100, 20_000), process.leases.resume)

    def _restart(self, process: SimulatedProcess) -> None:
        if not process.is_busy:
            process.stop()

    def _jump(self, process: SimulatedProcess) -> None:
        process.clock.offset_us += self.world.draw.number(-3_600, 3_600) * 1_000_000

    def _drift(self, process: SimulatedProcess) -> None:
        process.clock.set_rate(0.9 + self.world.draw.number(0, 20) / 100)

    def _judge(self, process: SimulatedProcess, error: BaseException) -> None:
        """
        Check that a process was allowed to end with this error.
        """
        peaceful = not self.world.swarm.kinds and not self.world.deaths_planned
        is_rivalry = len(self.processes) > 1 or self.world.swarm.knows("session_expired")
        match error:
            case FencedError():
                fair = is_rivalry or self.world.swarm.knows("registry_wiped")
                must(fair, "I4", "no process is fenced without another owner", error=error)
            case UnavailableError() | OutcomeUnknownError() | ConflictError():
                must(not peaceful, "I12", "without faults nothing fails", error=error)
            case _ if self._is_fenced(process):
                # A paused process holds a version whose files are deleted; any error is harmless there.
                self.world.tell("judge", f"{process.name} was fenced already")
            case _:
                raise Violation("I11", f"a process ended by {type(error).__name__}: {error}") from error

    def _is_fenced(self, process: SimulatedProcess) -> bool:
        control = control_interval(self._topology.name)
        stored = self.auditor.fences.get(control, 0) >> 32
        return any(
            other is not process and other.born_us >= process.born_us for other in self.processes
        ) and stored > (process.sequencer or 0)

    # -- the liveness phase ----------------------------------------------------------------

    def _liveness(self) -> None:
        """
        Faults are over: everything drains, within bounded rounds.
        """
        world = self.world
        world.make_peace()
        for process in self._alive():
            process.forgive()
            # A process that lost its leases without notice learns of it now, and ends.
            self._let(process)
        rounds = self._drain(lambda: not self.publisher.waits)
        must(rounds < _DRAIN_ROUNDS_MAX, "I12", "once faults stop, every record is acknowledged")
        owner = self._owner()
        for stream in self._topology.injectors:
            owner.inbox.append(Message(stream, promise=TIME_MAX_US))
        rounds = self._drain(lambda: self._is_over(owner))
        must(rounds < _DRAIN_ROUNDS_MAX, "I12", "once input ends, all timers fire and all comes to rest")
        self._let(owner)

    def _drain(self, is_over: Callable[[], bool]) -> int:
        for number in range(_DRAIN_ROUNDS_MAX):
            if is_over():
                return number
            if number % 4 == 0:
                self.publisher.repeat()
            self.world.pass_time(500)
            if not self._alive():
                self._bear("take")
            for process in self._alive():
                self._let(process)
        return _DRAIN_ROUNDS_MAX

    def _owner(self) -> SimulatedProcess:
        """
        The one process that continues: the pipeline's owner, or a new process; the others stop.
        """
        control = control_interval(self._topology.name)
        holder, _ = self.world.registry.owners.get(control, (None, None))
        holding = next((process for process in self._alive() if process.leases is holder), None)
        owner = holding or self._bear("take")
        for process in self._alive():
            if process is not owner:
                process.stop()
        return owner

    def _is_over(self, owner: SimulatedProcess) -> bool:
        must(owner.is_alive, "I12", "in peace no process ends", ended_by=owner.last_words)
        due = owner.next_wall_timer()
        if due is not None and due > owner.clock.now_us():
            self.world.pass_time((due - owner.clock.now_us()) / 1_000 / owner.clock.rate + 1)
            return False
        return due is None and owner.is_at_rest

    def _end(self) -> None:
        for process in self._alive():
            process.stop()
        self._check_cut(self.auditor.version)
        self._workload.check_end(read_end(self.world, self._topology, self.publisher.sent))


def simulate(
    seed: int | str,
    make_workload: Callable[[], Workload],
    *,
    steps: int = STEPS,
    kinds: Sequence[str] | None = None,
    deaths: Sequence[str] = (),
) -> SimulationOutcome:
    """
    Run one seed.

    Args:
        seed: the source of randomness; the same seed gives the same run, event by event.
        make_workload: creates a workload.
        steps: steps of the safety phase.
        kinds: kinds of faults to enable; ``None`` lets the seed decide, see `FAULTS`.
        deaths: failpoints at which processes die, one after another.

    Example:
        >>> from millpond.testing.simulation.bank import Bank
        >>> simulate(1, Bank, steps=20, kinds=["crash"]).violation
        ''
    """
    return Simulation(seed, make_workload(), steps=steps, kinds=kinds, deaths=deaths).run()
