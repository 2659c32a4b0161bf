"""A line of history: one store, with the processes that run its pipeline, its publishers and its auditor.

The store of a simulation is one, and each of its forks is another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from millpond.executor.pipeline.nodes import control_interval
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.history.verification import verify_store
from millpond.statestore.types import TIME_MAX_US
from millpond.testing.simulation.auditor import Auditor
from millpond.testing.simulation.process import Message, Settings, SimulatedProcess
from millpond.testing.simulation.publisher import Publisher
from millpond.testing.simulation.reader import read_end, read_states
from millpond.testing.simulation.versions.bookmark import Rows
from millpond.testing.simulation.versions.tool import Tool
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import Workload
from millpond.testing.simulation.world import ROWS, World

RETENTION_MS: Final = 20_000
"""How long versions stay readable in a simulated store, where upkeep is not eager."""

_DRAIN_ROUNDS_MAX: Final = 400
_PROCESSES_MAX: Final = 3


class Line:
    """A store and all who use it.

    Args:
        world: where its disks and leases are.
        workload: the code it runs.
        topology: the workload's.
        settings: how processes run it.

    Attributes:
        processes: all processes ever born.
        auditor: follows its table.
        publisher: sends it records.
        tools: the commands of operators that run now.
        pictures: the rows of versions, where they are remembered.
        delivered_before: of a fork: rows that the sinks of its original had from supersteps before its first one.
        meanwhile: called while a process is paused, after others have acted.
    """

    def __init__(self, world: World, workload: Workload, topology: Topology, settings: Settings) -> None:
        self.world = world
        self.workload = workload
        self.topology = topology
        self.settings = settings
        self.processes: list[SimulatedProcess] = []
        self.auditor: Auditor = Auditor(world, workload, topology)
        self.publisher: Publisher = Publisher(world, workload, topology.injectors, self.alive)
        self.tools: list[Tool] = []
        self.pictures: dict[int, Rows] = {}
        self.delivered_before: Mapping[str, Sequence[Mapping[str, Any]]] = {}
        self.meanwhile: Callable[[], None] = _nothing
        world.landed = self.auditor.landed
        world.others_act = self.others_act
        world.all_die = self.all_die

    def step(self, weights: Mapping[str, float]) -> None:
        """Let one of the actors act."""
        acts: dict[str, Callable[[], None]] = {
            "turn": self.turn,
            "publish": self.publisher.publish,
            "promise": self.publisher.promise,
            "time": self.time,
            "nemesis": self.nemesis,
            "read": self.read,
        }
        acts[self.world.draw.weighted(weights)]()

    def alive(self) -> list[SimulatedProcess]:
        """The processes that can take turns."""
        return [process for process in self.processes if process.is_alive]

    def all_die(self, how: str) -> None:
        """Kill every process and every tool."""
        for tool in self.tools:
            tool.kill(how)
        for process in self.alive():
            process.kill(how)

    def turn(self) -> None:
        """Let a process take a turn; one is born if there is none."""
        ready = [process for process in self.alive() if not process.is_busy]
        if not self.alive():
            ready = [self.bear()]
        if ready:
            self.let(self.world.draw.choice(ready))

    def let(self, process: SimulatedProcess) -> None:
        """Let this process take a turn, and judge how it ends."""
        process.turn()
        if process.ended_by is not None:
            self._judge(process, process.ended_by)
            process.ended_by = None

    def bear(self, on_held: str | None = None) -> SimulatedProcess:
        """Add a process."""
        draw = self.world.draw
        chosen = on_held or draw.weighted({"take": 0.7, "wait": 0.2, "refuse": 0.1})
        name = f"process-{len(self.processes)}"
        process = SimulatedProcess(
            self.world,
            name,
            self.workload.pipeline,
            self.settings,
            on_held=chosen,  # type: ignore[arg-type]
        )
        process.acknowledge = self.publisher.acknowledge
        self.processes.append(process)
        self.world.tell(name, f"is born, to {chosen}")
        return process

    def time(self) -> None:
        """Let time pass."""
        self.world.pass_time(self.world.draw.number(10, 3_000))

    def others_act(self) -> None:
        """Let others act while a process is paused."""
        draw = self.world.draw
        for _ in range(draw.number(1, 5)):
            act = draw.choice((self.turn, self.turn, self.time, self.publisher.publish, self._takeover))
            act()
        self.meanwhile()

    def _takeover(self) -> None:
        if self.world.swarm.knows("second_owner") and len(self.alive()) < _PROCESSES_MAX:
            self.let(self.bear("take"))

    def oldest_readable(self) -> int:
        """The oldest version that must be readable without a savepoint."""
        knows = self.world.swarm.knows
        if knows("clock_jump") or knows("clock_drift"):
            return self.auditor.version
        return self.auditor.oldest_readable(0 if knows("eager_upkeep") else RETENTION_MS)

    def read(self) -> None:
        """A reader reads a random version within the retention."""
        if self.auditor.version < 0:
            return
        version = self.world.draw.number(self.oldest_readable(), self.auditor.version)
        self.check_cut(version)
        self.world.tell("reader", f"has read version {version}")

    def check_cut(self, version: int) -> None:
        """Check a reader's view of a version."""
        try:
            states = read_states(self.world, self.topology, version)
        except DataError as error:
            raise Violation("I10", f"version {version} cannot be read any more: {error}") from error
        if version in self.pictures:
            for computation, found in states.items():
                rows = self.pictures[version].get(computation, {})
                expected = {key: row.state for key, row in rows.items() if row.state is not None}
                must(found == expected, "I10", "a version is what it was", version=version, of=computation)
        if not any(version in undone for undone in self.auditor.gone):
            self.workload.check_cut(version, states)

    # -- the nemesis -----------------------------------------------------------------------

    def nemesis(self) -> None:
        """Perhaps let a fault strike a process."""
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
        alive = self.alive()
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
        """Check that a process was allowed to end with this error."""
        peaceful = not self.world.swarm.kinds and not self.world.deaths_planned
        is_rivalry = (
            len(self.processes) > 1 or bool(self.auditor.undone) or self.world.swarm.knows("session_expired")
        )
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
        control = control_interval(self.topology.name)
        stored = self.auditor.fences.get(control, 0) >> 32
        own = process.sequencer or 0
        # One that was born before may have stood by for the leases all the while.
        is_followed = bool(self.auditor.undone) or any(
            other is not process and (other.born_us >= process.born_us or (other.sequencer or 0) > own)
            for other in self.processes
        )
        return is_followed and stored > own

    # -- the liveness phase ----------------------------------------------------------------

    def liveness(self) -> None:
        """Faults are over: everything drains, within bounded rounds."""
        world = self.world
        world.make_peace()
        for process in self.alive():
            process.forgive()
            # A process that lost its leases without notice learns of it now, and ends.
            self.let(process)
        rounds = self._drain(lambda: not self.publisher.waits)
        must(rounds < _DRAIN_ROUNDS_MAX, "I12", "once faults stop, every record is acknowledged")
        owner = self._owner()
        for stream in self.topology.injectors:
            owner.inbox.append(Message(stream, promise=TIME_MAX_US))
        rounds = self._drain(lambda: self._is_over(owner))
        must(rounds < _DRAIN_ROUNDS_MAX, "I12", "once input ends, all timers fire and all comes to rest")
        self.let(owner)

    def _drain(self, is_over: Callable[[], bool]) -> int:
        for number in range(_DRAIN_ROUNDS_MAX):
            if is_over():
                return number
            if number % 4 == 0:
                self.publisher.repeat()
            self.world.pass_time(500)
            if not self.alive():
                self.bear("take")
            for process in self.alive():
                self.let(process)
        return _DRAIN_ROUNDS_MAX

    def _owner(self) -> SimulatedProcess:
        """The one process that continues: the pipeline's owner, or a new process; the others stop."""
        control = control_interval(self.topology.name)
        holder, _ = self.world.registry.owners.get(control, (None, None))
        holding = next((process for process in self.alive() if process.leases is holder), None)
        owner = holding or self.bear("take")
        for process in self.alive():
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

    def end(self) -> None:
        """Stop, and compare everything with the records that were sent."""
        for process in self.alive():
            process.stop()
        self.check_cut(self.auditor.version)
        if self.auditor.undone:
            findings = verify_store(self.world.disk(ROWS)).findings
            must(not findings, "I11", "a store that was rewound is sound", findings=findings)
        end = read_end(
            self.world, self.topology, self.publisher.sent, self.delivered_before, self.auditor.undone
        )
        self.workload.check_end(end)


def _nothing() -> None:
    return
