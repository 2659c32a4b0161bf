"""
Work on a whole store by hand, repair and garbage collection: one at a time.

A running pipeline collects its own garbage, and repair is refused while its leases are held. What people
start by hand beside it needs a hold of its own: a collection that found a file to be garbage must not delete it
after a repair has brought it back. So both hold one more lease, of an interval that no
computation can have. It ends with the session of the process that holds it, so a dead one blocks nobody for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from millpond.statestore.errors import ConflictError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.lease import Lease, Leases
from millpond.statestore.types import Sequencer

__all__ = ["exclusive"]

_BY_HAND: Final = Interval("millpond/by_hand")
"""Names of computations have no slash."""


@contextmanager
def exclusive(leases: Leases) -> Iterator[Lease]:
    """
    Hold the store against everybody else who works on all of it by hand.

    Yields:
        The hold; its `Lease.check` tells whether it still is one.

    Raises:
        ConflictError: another process repairs the store, or collects its garbage.
        UnavailableError: the lease service is away.
    """
    try:
        lease = leases.take(_BY_HAND, above=Sequencer(0), on_held="refuse")
    except ConflictError as error:
        raise ConflictError(
            "another process is repairing the store or collecting its garbage by hand; "
            "wait for it (one that has died lets go after its session's time-out, seconds later)",
            **{name: value for name, value in error.details.items() if name == "holder"},
        ) from error
    try:
        yield lease
    finally:
        leases.release(lease)
