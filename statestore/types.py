"""Types and seams of the store, shared by the rest of Millpond.

Two integers of different meaning never share a type. `Clock`, `Rng`, `Objects` and `Leases` are constructor
arguments everywhere, so the simulator can replace all four and still run production code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Final, Literal, NewType, Protocol, Self, TypeAlias, TypeVar

from millpond.statestore.errors import check

_Class = TypeVar("_Class", bound=type)

# The key of a record or row; keys are ordered by their UTF-8 bytes (MillWheel §4.2).
Key = NewType("Key", str)
# The id under which an external publisher may deliver a record several times (§6.1.1).
RecordId = NewType("RecordId", bytes)
# The number of a lease; a later lease on the same interval has a higher one (§6.2).
Sequencer = NewType("Sequencer", int)
# The number of an interval's commit within a lease, from 0 for the fence commit.
CommitNumber = NewType("CommitNumber", int)
# The number of a round over all intervals with work, counted from 1; each round is one commit.
Superstep = NewType("Superstep", int)
# A version of the Delta table `rows`; each is a consistent cut of the pipeline.
TableVersion = NewType("TableVersion", int)

EventTimeMicros = NewType("EventTimeMicros", int)
"""A point in event time: microseconds since 1970 UTC."""

WallTimeMicros = NewType("WallTimeMicros", int)
"""A point in wall (processing) time: microseconds since 1970 UTC."""

# Before all time: the low watermark of an input that has not reported yet.
TIME_MIN_US: Final = EventTimeMicros(-(2**63))
# After all time: the low watermark of an input that has ended.
TIME_MAX_US: Final = EventTimeMicros(2**63 - 1)

Durability: TypeAlias = Literal["disk", "os_cache"]
"""
Where acknowledged data is. ``"disk"`` survives a power cut. ``"os_cache"`` is the operating system's cache, which
reaches the disk a little later: it survives the end of a process, but not that of the machine.
"""

DURABILITIES: Final[tuple[Durability, ...]] = ("disk", "os_cache")


class Clock(Protocol):
    """The only source of time."""

    def now_us(self) -> WallTimeMicros:
        """Return wall time in microseconds since 1970 UTC, which may jump."""

    def monotonic_us(self) -> int:
        """Return microseconds on a clock that never goes back, for measuring durations."""

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait ``duration_ms`` milliseconds; the simulator advances its own time instead."""


class Rng(Protocol):
    """The only source of randomness."""

    def random(self) -> float:
        """Return a uniformly distributed number in [0, 1)."""

    def token(self) -> str:
        """Return 32 hexadecimal digits, unique across processes, for file names and writer ids."""


class Objects(Protocol):
    """An object store below one root, the seam under log and row files.

    Paths are relative to the root, with ``/`` between parts. A method that raises `UnavailableError` may or may not
    have had its effect.

    An object written by `put_if_absent` or `put` survives a power cut, as do earlier puts of
    the same instance. The exception is a local folder opened with ``durability="os_cache"``.
    """

    @property
    def url(self) -> str:
        """The root as a URL that Delta readers and other processes can open."""

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, whole or not at all; `ObjectExistsError` means that nothing was written."""

    def put_unsynced(self, path: str, data: bytes) -> None:
        """Create an object that no commit names yet, like `put_if_absent` but without its sync.

        A power cut may revert it until the next `sync`, `put_if_absent` or `put` of the same instance, so many
        such objects cost one sync.
        """

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object, whole or not at all."""

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Make this instance's earlier puts and deletions durable, and these objects whichever process put them."""

    def get(self, path: str) -> bytes:
        """Return the object's bytes, or raise `ObjectMissingError`."""

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """Return all paths under ``prefix`` (whole path parts), sorted, greater than ``start_after``."""

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; missing objects are ignored."""


class Closeable(ABC):
    """Base of resources used in a ``with`` statement, whose end calls `close`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release the resources; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def quickly_pickled(cls: _Class) -> _Class:
    """Make a frozen dataclass with slots and several fields pickle in about half of the time.

    The default looks the fields up again for each value, in Python, in both directions.
    """
    names = tuple(field.name for field in fields(cls))
    check(len(names) > 1, "a quickly pickled class has several fields", fields=names)
    state_of = attrgetter(*names)
    # Set fields through the slots: the class is frozen, so its own `__setattr__` refuses.
    setters = tuple(getattr(cls, name).__set__ for name in names)

    def get_state(self: object) -> Any:
        return state_of(self)

    def set_state(self: object, state: tuple[object, ...]) -> None:
        for set_field, value in zip(setters, state, strict=True):
            set_field(self, value)

    for name, method in (("__getstate__", get_state), ("__setstate__", set_state)):
        setattr(cls, name, method)
    return cls
