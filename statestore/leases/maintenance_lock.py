"""The maintenance lock: offline repair and offline garbage collection of a store exclude each other.

A running pipeline collects its own garbage, and repair is refused while its leases are held. Tools that
operators start need a lock of their own: a collection that judged a file to be garbage must not delete it
after a repair has restored it. So both take a lease on an interval that no computation can have. The
lease ends with the session of the process that holds it, so a dead process blocks others only briefly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millpond.statestore.errors import ConflictError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, Leases
from millpond.statestore.types import Sequencer

_BY_HAND: Final = Interval("millpond/by_hand")
"""Names of computations have no slash."""


@contextmanager
def exclusive(leases: Leases) -> Iterator[Lease]:
    """Hold the store's maintenance lock for the length of the block.

    Yields:
        The lease behind the lock; call its `Lease.check` before each irreversible step.

    Raises:
        ConflictError: another process is repairing the store or collecting its garbage offline.
        UnavailableError: the lease service is unavailable.
    """
    try:
        lease = leases.take(_BY_HAND, above=Sequencer(0), on_held="refuse")
    except ConflictError as error:
        raise ConflictError(
            "another process is repairing the store or collecting its garbage offline; "
            "wait for it (the lock of a dead process ends seconds later, with its session)",
            **{name: value for name, value in error.details.items() if name == "holder"},
        ) from error
    try:
        yield lease
    finally:
        leases.release(lease)
