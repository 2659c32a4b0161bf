"""An object store that fails on command.

Faults are injected between the engine and the store, so the commit code under test is the commit
code of production. A fault is planned for a future call of one operation:

- ``LOST``: the call has its effect, and its reply is lost;
- ``REFUSED``: the call has no effect, and fails (5xx, reset, no space left);
- ``LATE``: the call fails, and has its effect later, when `FaultyObjects.land` is called.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

from millpond.statestore.errors import ObjectExistsError, UnavailableError
from millpond.statestore.objects.ranges import ByteRange, Tail, read_ranges, read_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from millpond.statestore.types import Objects

_Result = TypeVar("_Result")


class Fault(Enum):
    """The effect of a fault on a call."""

    LOST = auto()
    REFUSED = auto()
    LATE = auto()


@dataclass(slots=True)
class _Planned:
    fault: Fault
    operation: str
    within: str
    times: int


class FaultyObjects:
    """`Objects` over other objects, with planned faults.

    Attributes:
        calls: number of calls by operation.
        before: called with operation and path before each operation, so that a test can let another
            writer act at exactly this moment.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Objects) -> None:
        self._inner = inner
        self._lock = threading.RLock()
        self._planned: list[_Planned] = []
        self._late: list[Callable[[], None]] = []
        self.calls: Counter[str] = Counter()
        self.before: Callable[[str, str], None] | None = None

    def plan(self, fault: Fault, operation: str, *, within: str = "", times: int = 1) -> None:
        """Make the next ``times`` calls of ``operation`` on paths that contain ``within`` fail."""
        self._planned.append(_Planned(fault, operation, within, times))

    def interrupt(self, operation: str, action: Callable[[], object]) -> None:
        """Call ``action`` once, right before the next call of ``operation``."""
        waiting = [action]

        def before(called: str, _path: str) -> None:
            if called == operation and waiting:
                waiting.pop()()

        self.before = before

    def heal(self) -> None:
        """Cancel the faults that have not struck; late effects stay pending."""
        self._planned.clear()

    def land(self) -> None:
        """Apply the late effects; a put-if-absent whose object exists by now has none."""
        late, self._late = self._late, []
        for effect in late:
            try:
                effect()
            except ObjectExistsError:
                continue

    @property
    def url(self) -> str:
        """The root of the inner store."""
        return self._inner.url

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, unless a fault was planned."""
        self._call("put_if_absent", path, lambda: self._inner.put_if_absent(path, data))

    def put_unsynced(self, path: str, data: bytes) -> None:
        """Create the object, to be synced later, unless a fault was planned for a put-if-absent."""
        self._call("put_if_absent", path, lambda: self._inner.put_unsynced(path, data))

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Sync the inner store, unless a fault was planned."""
        wanted = tuple(paths)
        self._call("sync", ",".join(wanted), lambda: self._inner.sync(wanted))

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object, unless a fault was planned."""
        self._call("put", path, lambda: self._inner.put(path, data))

    def get(self, path: str) -> bytes:
        """The object's bytes, unless a fault was planned."""
        return self._call("get", path, lambda: self._inner.get(path))

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of the object, unless a fault was planned for a get."""
        return self._call("get", path, lambda: read_ranges(self._inner, path, ranges))

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The last bytes of the object, unless a fault was planned for a get."""
        return self._call("get", path, lambda: read_tail(self._inner, path, size_bytes))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """The paths below a prefix, unless a fault was planned."""
        return self._call("list", prefix, lambda: self._inner.list(prefix, start_after))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove the objects, unless a fault was planned."""
        wanted = tuple(paths)
        self._call("delete", ",".join(wanted), lambda: self._inner.delete(wanted))

    def _call(self, operation: str, path: str, action: Callable[[], _Result]) -> _Result:
        with self._lock:
            self.calls[operation] += 1
            fault = self._next_fault(operation, path)
        if self.before is not None:
            self.before(operation, path)
        if fault is None:
            return action()
        if fault is Fault.LOST:
            action()
        if fault is Fault.LATE:
            self._late.append(lambda: _discard(action()))
        raise UnavailableError("a planned fault", operation=operation, path=path, fault=fault.name)

    def _next_fault(self, operation: str, path: str) -> Fault | None:
        for planned in self._planned:
            if planned.operation == operation and planned.within in path and planned.times > 0:
                planned.times -= 1
                return planned.fault
        return None


def _discard(_result: object) -> None:
    return
