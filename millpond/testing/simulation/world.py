"""The world of a simulation: one time, the disks, the lease service, and the scheduled events.

Everything happens in one thread. Processes take turns: a turn runs until it is over, but at each
call to a disk the world may kill the process, fail the call, or let others act first, so that a
process can be paused in the middle of a commit while another takes over.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.local import LocalObjects
from millpond.testing.faults.power_cut import PowerCutFiles
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.fault import Swarm
from millpond.testing.simulation.trace import Trace
from millpond.testing.simulation.violation import Violation

ROWS: Final = "rows"
"""The disk of the store's table; sinks have disks of their own."""

FILE_CALL: Final = "file"
"""The operation that a fault of a single call to the file system names."""

FOLDER: Final = "folder"
"""The disk of the store's folder next to its table, on which no fault strikes."""

START_US: Final = 1_700_000_000_000_000
"""When the world begins."""

_PAUSES_DEEP: Final = 2


class Crash(BaseException):
    """A simulated process has died; no code of it runs any more."""


class Mortal(Protocol):
    """A process as the world sees it: it has a name, and it can die."""

    name: str

    def die(self, where: str) -> None:
        """End immediately by raising `Crash`."""
        ...

    def maybe_die(self, failpoint: str) -> None:
        """Die at a failpoint if the seed demands it."""
        ...

    def must_live(self) -> None:
        """Raise `Crash` if it has died already."""
        ...

    def next_fault(self, operation: str) -> str | None:
        """The fault of the current call; ``None`` for none."""
        ...


@dataclass(slots=True)
class _Machines:
    """What the world of a store and the worlds of its forks have in common: time, disks, and who takes a turn."""

    now_us: int = START_US
    power_cuts: int = 0
    files: PowerCutFiles = field(default_factory=PowerCutFiles)
    turns: list[Mortal] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    violations: list[Violation] = field(default_factory=list)
    failpoints: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=count)
    agenda: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)


class World:
    """The state that processes and actors share.

    Args:
        seed: the source of randomness.
        kinds: kinds of faults to enable; ``None`` draws them.
        deaths: failpoints; the first process to reach the first of them dies there, then the second …
        original: the world of the store that this one's is a fork of: with the same time and file system, but disks,
            leases and draws of its own.

    Attributes:
        others_act: lets others act while a process is paused; set by the simulation.
        landed: called with each object that is created on a disk; set by the simulation.
        all_die: ends every process; set by the simulation.
    """

    def __init__(
        self,
        seed: int | str,
        kinds: Iterable[str] | None = None,
        deaths: Iterable[str] = (),
        *,
        original: World | None = None,
    ) -> None:
        self.seed = seed
        self.draw: Draw = Draw(f"{seed}/world")
        self.swarm: Swarm = Swarm(Draw(f"{seed}/swarm"), kinds, aside=Draw(f"{seed}/swarm/aside"))
        self.deaths: deque[str] = deque(deaths)
        self.deaths_planned: bool = bool(self.deaths)
        machines: _Machines = _Machines() if original is None else original._machines  # noqa: SLF001 - an instance of this class
        self._machines: _Machines = machines
        self._place = "/world" if original is None else f"/{seed}"
        self.trace: Trace = machines.trace
        self.registry: MemoryRegistry = MemoryRegistry()
        self.files: PowerCutFiles = machines.files
        self.disks: dict[str, LocalObjects] = {}
        self.failpoints: Counter[str] = machines.failpoints
        self.turns: list[Mortal] = machines.turns
        self.violations: list[Violation] = machines.violations
        self.others_act: Callable[[], None] = _nothing
        self.landed: Callable[[str, str], None] = _nothing_landed
        self.all_die: Callable[[str], None] = _none_die
        if original is None:
            self.files.before = self._before_file_call

    @property
    def now_us(self) -> int:
        """The time."""
        return self._machines.now_us

    @property
    def power_cuts(self) -> int:
        """The number of power failures."""
        return self._machines.power_cuts

    def disk(self, name: str) -> LocalObjects:
        """The present disk of that name; created empty on first use."""
        if name not in self.disks:
            self.mount(name)
        return self.disks[name]

    def mount(self, name: str) -> LocalObjects:
        """The disk of that name for a separate process: the store of production, on the world's file system."""
        mounted = LocalObjects(f"{self._place}/{name}", files=self.files)
        # Operators copy all disks that the world knows.
        self.disks.setdefault(name, mounted)
        return mounted

    def cut_power(self) -> None:
        """End all processes, and let the disks forget unsynced data, or some of it."""
        self.tell("world", "loses its power")
        self._machines.power_cuts += 1
        self.all_die("as the power fails")
        # Half the time the operating system had written nothing unasked, else any part.
        had_written = self.draw.chance(0.5)
        self.files.cut_power(
            lambda outcomes: self.draw.number(0, outcomes - 1) if had_written else 0,
        )

    def _before_file_call(self, call: str, path: str) -> None:
        if not self.turns:
            return
        process = self.turns[-1]
        process.must_live()
        fault = process.next_fault(FILE_CALL)
        if fault == "power_cut":
            self.cut_power()
        elif fault == "crash_in_write":
            process.die(f"before {call} {path}")
        process.must_live()

    def break_promise(self, violation: Violation) -> None:
        """Record a broken promise, even if the running code swallows the error."""
        self.violations.append(violation)
        raise violation

    # -- time ------------------------------------------------------------------------------

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        due_us = self.now_us + int(delay_ms * 1_000)
        heapq.heappush(self._machines.agenda, (due_us, next(self._machines.numbers), action))

    def pass_time(self, duration_ms: float) -> None:
        """Advance the time, and run the due events."""
        until_us = self.now_us + max(int(duration_ms * 1_000), 1)
        machines = self._machines
        while machines.agenda and machines.agenda[0][0] <= until_us:
            due_us, _, action = heapq.heappop(machines.agenda)
            machines.now_us = max(machines.now_us, due_us)
            action()
        machines.now_us = max(machines.now_us, until_us)

    def make_peace(self) -> None:
        """End all faults: scheduled events still happen, but lease sessions of live processes do not end."""
        self.swarm.active = False
        self.tell("world", "is at peace")

    # -- processes -------------------------------------------------------------------------

    def reached(self, name: str) -> None:
        """Code has reached a failpoint: the running process may die there."""
        self.failpoints[name] += 1
        if not self.turns:
            return
        process = self.turns[-1]
        if self.swarm.active and self.deaths and self.deaths[0] == name:
            self.deaths.popleft()
            process.die(f"at {name}")
        process.maybe_die(name)
        process.must_live()

    def pause(self, process: Mortal) -> None:
        """Pause a process while others act; another may own the pipeline afterwards."""
        if len(self.turns) > _PAUSES_DEEP:
            return
        self.trace.add(self.now_us, process.name, "is paused")
        self.others_act()
        self.trace.add(self.now_us, process.name, "goes on")

    def tell(self, who: str, what: str) -> None:
        """Add an event to the trace."""
        self.trace.add(self.now_us, who, what)


def _nothing() -> None:
    return


def _none_die(_how: str) -> None:
    return


def _nothing_landed(_disk: str, _path: str) -> None:
    return
