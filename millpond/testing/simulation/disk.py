"""A disk as one process sees it: calls fail, land late, land twice, or are slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.violation import Violation
from millpond.testing.simulation.world import FILE_CALL, Mortal, World

_Result = TypeVar("_Result")

_PUTS: Final = frozenset({"put_if_absent", "put", "delete"})
_READS: Final = frozenset({"get", "list"})
_SYNCS: Final = frozenset({"sync"})
_FILES: Final = frozenset({FILE_CALL})
DISK_FAULTS: Final = {
    "reply_lost": _PUTS,
    "put_refused": _PUTS,
    "late_landing": _PUTS,
    "double_landing": _PUTS,
    "read_fails": _READS,
    "outage": _PUTS | _READS,
    "slow_store": _PUTS | _READS,
    "pause": _PUTS | _READS,
    "crash": _PUTS | _READS | _SYNCS,
    "crash_in_write": _FILES,
    "power_cut": _FILES,
}
"""Faults of a call, with the operations that they affect."""

PLANNED_BY_NEMESIS: Final = frozenset({"crash", "crash_in_write", "power_cut"})
"""Those that a turn does not draw for itself."""

_FAR: Final = 0.25
_FAILING: Final = frozenset({"reply_lost", "put_refused", "late_landing", "read_fails"})


@dataclass(slots=True)
class PlannedFault:
    """A fault of one of a process's next calls.

    Attributes:
        kind: one of `DISK_FAULTS`.
        calls_before: number of calls of its operations that succeed first.
    """

    kind: str
    calls_before: int


class DiskUser(Mortal, Protocol):
    """A process as its disks see it.

    Attributes:
        store_away_until_us: the store answers none of its calls before this time.
    """

    store_away_until_us: int

    def tell_what_is_durable(self) -> None:
        """Send publishers the receipts that are durable."""
        ...

    def next_fault(self, operation: str) -> str | None:
        """The fault of the current call; ``None`` for none."""
        ...


class SimulatedDisk:
    """`Objects` of one process over a disk of the world."""

    def __init__(self, world: World, process: DiskUser, name: str) -> None:
        self._world = world
        self._process = process
        self._name = name
        # A separate store: what one process has put and not synced, another does not know of.
        self._inner = world.mount(name)

    @property
    def url(self) -> str:
        """The disk's name as a URL."""
        return self._inner.url

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, unless a fault strikes."""
        self._call("put_if_absent", path, lambda: self._inner.put_if_absent(path, data))
        self._world.trace.note(data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        """Create the object, to be synced later, unless a fault strikes."""
        self._call("put_if_absent", path, lambda: self._inner.put_unsynced(path, data))
        self._world.trace.note(data)

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Let objects survive a power cut, unless a fault strikes."""
        wanted = tuple(paths)
        self._call("sync", ",".join(wanted), lambda: self._inner.sync(wanted))

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object, unless a fault strikes."""
        if path.endswith(".json"):
            self._world.break_promise(Violation("I4", f"a commit is put where another may be: {path}"))
        self._call("put", path, lambda: self._inner.put(path, data))

    def get(self, path: str) -> bytes:
        """The object's bytes, unless a fault strikes."""
        return self._call("get", path, lambda: self._inner.get(path))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """The paths below a prefix, unless a fault strikes."""
        return self._call("list", prefix, lambda: self._inner.list(prefix, start_after))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove the objects, unless a fault strikes."""
        wanted = tuple(paths)
        self._call("delete", ",".join(wanted), lambda: self._inner.delete(wanted))

    def _call(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        world, process = self._world, self._process
        process.must_live()
        process.tell_what_is_durable()
        fault = process.next_fault(operation)
        if fault == "pause":
            world.pause(process)
        elif fault == "slow_store":
            world.pass_time(world.draw.number(100, 20_000))
        elif fault == "outage":
            process.store_away_until_us = world.now_us + world.draw.number(20, 800) * 1_000
        elif fault == "crash":
            process.die(f"before {operation} {path}")
        process.must_live()
        power_cuts = world.power_cuts
        is_away = world.now_us < process.store_away_until_us
        if fault == "late_landing" and not is_away:
            world.later(
                world.draw.number(10, 30_000), lambda: self._land(operation, path, action, power_cuts)
            )
        if is_away or fault in {"put_refused", "late_landing", "read_fails"}:
            self._fail(operation, path, fault or "outage")
        result = self._act(operation, path, action)
        if fault == "double_landing":
            world.later(
                world.draw.number(10, 30_000), lambda: self._land(operation, path, action, power_cuts)
            )
        if fault == "reply_lost":
            self._fail(operation, path, fault)
        return result

    def _act(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        try:
            result = action()
        except Exception as error:
            self._world.tell(self._process.name, f"{operation} {self._name} {path}: {type(error).__name__}")
            raise
        if operation in _PUTS:
            self._world.tell(self._process.name, f"{operation} {self._name} {path}")
            if operation == "put_if_absent":
                self._world.landed(self._name, path)
        return result

    def _fail(self, operation: str, path: str, fault: str) -> None:
        self._world.tell(self._process.name, f"{operation} {self._name} {path}: {fault}")
        raise UnavailableError("a simulated fault", operation=operation, path=path, fault=fault)

    def _land(self, operation: str, path: str, action: Callable[[], _Result], power_cuts: int) -> None:
        if power_cuts != self._world.power_cuts:
            self._world.tell(self._process.name, f"late {operation} {self._name} {path}: lost its power")
            return
        try:
            action()
        except ObjectExistsError:
            self._world.tell(self._process.name, f"late {operation} {self._name} {path}: too late")
            return
        self._world.tell(self._process.name, f"late {operation} {self._name} {path}")
        if operation == "put_if_absent":
            self._world.landed(self._name, path)


class _FarDisk(SimulatedDisk):
    """A disk that the engine takes for an object store, where it saves requests."""

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        """The bytes of some objects, ``None`` for those that are missing."""
        return [self._get_if_there(path) for path in paths]

    def _get_if_there(self, path: str) -> bytes | None:
        try:
            return self.get(path)
        except ObjectMissingError:
            return None


def simulated_disk(world: World, process: DiskUser, name: str) -> SimulatedDisk:
    """A disk of the world as a process sees it, in some worlds an object store."""
    return (_FarDisk if Draw(f"{world.seed}/far").chance(_FAR) else SimulatedDisk)(world, process, name)
