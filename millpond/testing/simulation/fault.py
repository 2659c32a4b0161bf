"""Kinds of faults, and the choice of kinds per seed.

As FoundationDB's BUGGIFY: each seed enables each kind with probability 1/4, and an enabled kind
strikes with probability 1/4 at each opportunity. So every mixture of few kinds comes up, which a
constant rate of all kinds would not produce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from millpond.statestore.errors import InvalidError
from millpond.testing.simulation.chance import Draw

FAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "reply_lost": "a put lands and its reply is lost",
        "put_refused": "a put fails before it has any effect",
        "late_landing": "a put fails for its caller and lands later, even after the caller's death",
        "double_landing": "a put is repeated by the network, later",
        "read_fails": "a get or a listing fails",
        "outage": "the object store is away for a process, for seconds",
        "slow_store": "one call takes seconds",
        "pause": "a process stands still in the middle of a call while others go on",
        "lease_suspended": "the lease service is away for a process, for seconds",
        "session_expired": "a lease session ends",
        "news_held": "a process does not hear that it has lost its leases",
        "registry_wiped": "the lease service comes back empty",
        "second_owner": "another process takes over while the first goes on",
        "crash": "a process dies between any two calls",
        "crash_at_failpoint": "a process dies at a named failpoint",
        "restart": "a process stops in order, and another starts",
        "message_lost": "records on their way in are lost",
        "message_twice": "records on their way in come twice",
        "message_delayed": "records on their way in are delayed and overtaken",
        "ack_lost": "an acknowledgement is lost",
        "clock_jump": "a process's wall clock jumps by up to an hour, either way",
        "clock_drift": "a process's clock runs up to a tenth fast or slow",
        "poison": "a record makes user code raise",
        "no_cache": "a process keeps no row in memory",
        "eager_upkeep": "compactions, checkpoints and collections come as often as can be",
        "fast_clock": "a publisher's clock is days fast, so that what all others send is late",
        "sent_again": "a record is sent again long after it was acknowledged",
        "crash_in_write": "a process dies between any two calls to its file system, such as a name and its sync",
        "power_cut": "all processes die, and of what their disks had not synced any part may be lost",
        "store_copied": "the store's folder is copied, and the copy is run with the same sinks",
        "backup_restored": "a backup of the store is put back, and run with the sinks of now",
        "foreign_commit": "another engine restores, deletes, updates, merges or writes rows of the store",
        "keys_cut": "intervals are split and merged while the pipeline runs",
        "savepoints": "savepoints are made and dropped while the pipeline runs and collects garbage",
        "forked": "a store is forked, and both go on next to each other",
        "rewound": "the store is taken back to an older version, and gets its input from there again",
        "pipeline_updated": "the running pipeline is updated, and a computation comes and goes",
    }
)
"""Every kind of fault, with its effect."""

OPERATOR_FAULTS: Final = ("store_copied", "backup_restored", "foreign_commit")
"""Faults of operators and other engines: tried aside, so that they draw from a stream of their own."""

VERSION_FAULTS: Final = ("savepoints", "forked", "rewound")
"""What operators do with versions of a store, by tools that faults strike like any process."""

DRAWN_ASIDE: Final = (*OPERATOR_FAULTS, "keys_cut", *VERSION_FAULTS, "pipeline_updated")
"""Faults that draw from streams of their own, so that a seed's other faults are the same with and without them."""

_ON: Final = 0.25
_STRIKES: Final = 0.25


class Swarm:
    """The kinds of faults that a world enables, and how often each has struck.

    Args:
        draw: the source of randomness.
        kinds: the kinds to enable; ``None`` draws them.
        aside: the source of randomness for `DRAWN_ASIDE`, which disturb no other draw.

    Raises:
        InvalidError: there is no such kind.
    """

    def __init__(self, draw: Draw, kinds: Iterable[str] | None = None, *, aside: Draw) -> None:
        self._draw = draw
        drawn = {kind for kind in FAULTS if (aside if kind in DRAWN_ASIDE else draw).chance(_ON)}
        chosen = drawn if kinds is None else set(kinds)
        unknown = sorted(chosen - set(FAULTS))
        if unknown:
            raise InvalidError("there is no such fault", fault=unknown[0], faults=", ".join(FAULTS))
        self.kinds: tuple[str, ...] = tuple(kind for kind in FAULTS if kind in chosen)
        self.struck: Counter[str] = Counter()
        self.active = True

    def knows(self, kind: str) -> bool:
        """Return True if the kind is enabled in this world."""
        return kind in self.kinds

    def strikes(self, kind: str) -> bool:
        """Whether a fault of this kind strikes now; counts it if so."""
        if not self.active or kind not in self.kinds or not self._draw.chance(_STRIKES):
            return False
        self.struck[kind] += 1
        return True
