"""A tool that an operator runs: a process of one command, on which the faults of its world strike like on any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final, TypeVar

from millpond.statestore.leases.memory import MemoryLeases
from millpond.statestore.rows.row_format import RowFormat
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import SeededRng
from millpond.testing.simulation.chance import Draw, ProcessClock
from millpond.testing.simulation.disk import DISK_FAULTS, PlannedFault, SimulatedDisk, simulated_disk
from millpond.testing.simulation.violation import Violation
from millpond.testing.simulation.world import FILE_CALL, FOLDER, ROWS, Crash, World

_Result = TypeVar("_Result")

_STRIKES: Final = 0.25
_CALLS_BEFORE_MAX: Final = 24
_FILE_CALLS_BEFORE_MAX: Final = 60
_SESSION_MS: Final = 10_000


class Tool:
    """A process that runs one command, and ends.

    Args:
        world: the world it lives in.
        name: unique in the world.
        row_format: the encoding of row files.
        is_safe: whether no fault strikes it.

    Attributes:
        error: what its command raised; ``None`` if it succeeded, or if the tool died.
        is_dead: whether it died before the end of its command.
    """

    def __init__(self, world: World, name: str, row_format: RowFormat, *, is_safe: bool = False) -> None:
        self.name = name
        self.clock: ProcessClock = ProcessClock(lambda: world.now_us, self._sleep)
        self.rng: SeededRng = SeededRng(f"{world.seed}/{name}")
        self.leases: MemoryLeases = MemoryLeases(world.registry, self.clock, writer_id=name)
        self.store_away_until_us = 0
        self.error: Exception | None = None
        self.is_dead: bool = False
        self._world = world
        self._row_format = row_format
        draw, knows = Draw(f"{world.seed}/{name}/faults"), world.swarm.knows
        self._planned = [
            PlannedFault(kind, draw.number(0, most))
            for kind, operations in DISK_FAULTS.items()
            for most in (_FILE_CALLS_BEFORE_MAX if FILE_CALL in operations else _CALLS_BEFORE_MAX,)
            if not is_safe and knows(kind) and draw.chance(_STRIKES)
        ]
        dies = not is_safe and knows("crash_at_failpoint") and draw.chance(_STRIKES)
        self._dies_after = draw.number(0, 8) if dies else None

    def run(self, command: Callable[[], _Result]) -> _Result | None:
        """Run the command; its exception is in `error`, and only broken promises are raised."""
        world = self._world
        world.turns.append(self)
        try:
            result = command()
        except Crash:
            return None
        except Violation:
            raise
        except Exception as error:  # noqa: BLE001 - what may end a tool is for the simulation to judge
            world.tell(self.name, f"has ended: {type(error).__name__}: {error}")
            self.error = error
            return None
        finally:
            world.turns.pop()
            world.later(_SESSION_MS, self.leases.expire_session)
        return None if self.is_dead else result

    @property
    def has_succeeded(self) -> bool:
        """Return True if its command completed."""
        return self.error is None and not self.is_dead

    def disk(self, name: str) -> SimulatedDisk:
        """A disk of the world, as this process sees it."""
        return simulated_disk(self._world, self, name)

    def store(self) -> Store:
        """The world's store, as a command opens it."""
        disk = self.disk(ROWS)
        return Store(
            disk.url,
            disk,
            storage_options={},
            clock=self.clock,
            rng=self.rng,
            leases=lambda _store_id, _writer_id: self.leases,
            catalog_url=None,
            resources=ExitStack(),
            row_format=self._row_format,
            marks=self._world.disk(FOLDER),
            mark_thread=False,
        )

    # -- as the world and its disks see it -------------------------------------------------

    def die(self, where: str) -> None:
        """Die immediately; only within its command."""
        self.kill(where)
        raise Crash

    def kill(self, where: str) -> None:
        """Be killed from outside; the lease session ends later."""
        if not self.is_dead:
            self.is_dead = True
            self._world.tell(self.name, f"dies {where}")

    def maybe_die(self, failpoint: str) -> None:
        """Die at this failpoint if that was planned."""
        if self._dies_after is not None:
            self._dies_after -= 1
            if self._dies_after < 0:
                self._dies_after = None
                self.die(f"at {failpoint}")

    def must_live(self) -> None:
        """End the command of a tool that has died in the meantime."""
        if self.is_dead:
            raise Crash

    def next_fault(self, operation: str) -> str | None:
        """The fault of the current call; ``None`` for none."""
        for planned in self._planned:
            if operation in DISK_FAULTS[planned.kind]:
                planned.calls_before -= 1
                if planned.calls_before < 0:
                    self._planned.remove(planned)
                    return planned.kind
        return None

    def tell_what_is_durable(self) -> None:
        """Tell no one: a tool takes no records."""

    def _sleep(self, duration_ms: float) -> None:
        self.must_live()
        self._world.pass_time(duration_ms)
        self.must_live()
