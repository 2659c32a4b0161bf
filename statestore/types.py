"""Types and seams of the store, shared by the rest of Millpond.

Two integers of different meaning never share a type. `Clock`, `Rng`, `Objects`
and `Leases` are constructor arguments everywhere, so the simulator can replace
all four while everything else under test is production code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NewType, Protocol, TypeAlias

Key = NewType("Key", str)
"""The key of a record or row; keys are ordered by their UTF-8 bytes (MillWheel §4.2)."""

RecordId = NewType("RecordId", bytes)
"""The id under which an external publisher may deliver a record several times (§6.1.1)."""

Sequencer = NewType("Sequencer", int)
"""The number of a lease; a later lease on the same interval has a higher one (§6.2)."""

CommitNumber = NewType("CommitNumber", int)
"""Number of an interval's commit within a lease: it rises by one; the fence commit has 0."""

Superstep = NewType("Superstep", int)
"""Number of a round over all intervals with work; each is one commit, counted from 1."""

TableVersion = NewType("TableVersion", int)
"""A version of the Delta table ``rows``; each is a consistent cut of the pipeline."""

EventTimeMicros = NewType("EventTimeMicros", int)
"""A point in event time: microseconds since 1970 UTC."""

WallTimeMicros = NewType("WallTimeMicros", int)
"""A point in wall (processing) time: microseconds since 1970 UTC."""

TIME_MIN_US: Final = EventTimeMicros(-(2**63))
"""Before all time: the low watermark of an input that has not reported yet."""

TIME_MAX_US: Final = EventTimeMicros(2**63 - 1)
"""After all time: the low watermark of an input that has ended."""

Durability: TypeAlias = Literal["disk", "os_cache"]
"""
Where acknowledged data is: on the disk, which a power cut does not change, or in the operating system's cache,
which writes it to the disk a little later and survives the end of a process, but not that of the machine.
"""

DURABILITIES: Final[tuple[Durability, ...]] = ("disk", "os_cache")
"""Both."""


class Clock(Protocol):
    """The only source of time."""

    def now_us(self) -> WallTimeMicros:
        """Wall time in microseconds since 1970 UTC; may jump."""
        ...

    def monotonic_us(self) -> int:
        """Microseconds on a clock that never goes back, for measuring durations."""
        ...

    def sleep_ms(self, duration_ms: float) -> None:
        """Wait ``duration_ms`` milliseconds; the simulator advances its own time instead."""
        ...


class Rng(Protocol):
    """The only source of randomness."""

    def random(self) -> float:
        """A uniformly distributed number in [0, 1)."""
        ...

    def token(self) -> str:
        """32 hexadecimal digits, unique across processes: for file names and writer ids."""
        ...


class Objects(Protocol):
    """An object store below one root, the seam under log and row files.

    Paths are relative to the root, with ``/`` between parts. A method that raises
    `UnavailableError` may or may not have had its effect.

    What `put_if_absent` and `put` have written survives a power cut, and so does all that the same instance has put
    before; unless the root is a local folder that was opened with ``durability="os_cache"``.
    """

    @property
    def url(self) -> str:
        """The root as a URL that Delta readers and other processes can open."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, whole or not at all.

        Raises:
            ObjectExistsError: it exists; nothing was written.
            UnavailableError: it may or may not have been written.
        """
        ...

    def put_unsynced(self, path: str, data: bytes) -> None:
        """As `put_if_absent`, for an object that no commit names yet: a power cut may take it back until the next
        `sync`, `put_if_absent` or `put` of the same instance. Many of them then cost one sync.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object, whole or not at all."""
        ...

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Let all that this instance has put or deleted survive a power cut, and these objects, by whatever process they were put."""
        ...

    def get(self, path: str) -> bytes:
        """The object's bytes.

        Raises:
            ObjectMissingError: there is no such object.
        """
        ...

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """All paths under ``prefix`` (whole path parts), sorted, greater than ``start_after``."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; missing objects are ignored."""
        ...
