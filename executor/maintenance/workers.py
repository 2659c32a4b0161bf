"""
Who does the work of upkeep: Spark jobs, helper processes, a thread, or the caller.

Large folds have a worker of their own, so that they keep neither small ones nor collections waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from millpond.executor.maintenance.helper_process import HelperProcess
from millpond.executor.maintenance.inline import INLINE
from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock

if TYPE_CHECKING:
    from millpond.executor.maintenance.scheduler import UpkeepPolicy

__all__ = ["Jobs", "Place", "UpkeepWorkers", "workers_of"]

Place: TypeAlias = Literal["auto", "spark", "process", "thread"]
"""Where folds are prepared; see `UpkeepPolicy`."""

Jobs: TypeAlias = Callable[[str, int], Executor]
"""Makes what runs Spark jobs, given a name and how many run at a time."""

_SMALL_AT_ONCE: Final = 2
_LARGE_S_MAX: Final = 21_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepWorkers:
    """
    Where each kind of work is done.

    Attributes:
        rounds: garbage collection.
        small: folds that fit into memory.
        large: those that go through a disk.
    """

    rounds: Executor
    small: Executor
    large: Executor

    def shutdown(self) -> None:
        """
        Stop; what is small is waited for, large folds and Spark jobs are cut short.
        """
        if isinstance(self.large, HelperProcess):
            self.large.abort()
        for worker in (self.small, self.large, self.rounds):
            worker.shutdown(wait=True, cancel_futures=True)


def workers_of(store: Store, clock: Clock, policy: UpkeepPolicy) -> UpkeepWorkers:
    """
    The workers for a policy, as far as the store can be opened from where they are; none is started yet.

    Args:
        store: the open store.
        clock: the run's.
        policy: what is wanted.
    """
    if not policy.background:
        return UpkeepWorkers(rounds=INLINE, small=INLINE, large=INLINE)
    is_shared = isinstance(store.objects, ObstoreObjects) and isinstance(clock, SystemClock)
    if policy.place == "thread" or not is_shared or not sys.executable:
        rounds: Executor = ThreadPoolExecutor(1, "millpond-upkeep")
        return UpkeepWorkers(rounds=rounds, small=rounds, large=ThreadPoolExecutor(1, "millpond-folds"))
    rounds = HelperProcess("millpond-upkeep")
    jobs = policy.jobs
    if jobs is not None:
        return UpkeepWorkers(
            rounds=rounds, small=jobs("millpond-folds", _SMALL_AT_ONCE), large=jobs("millpond-large-folds", 1)
        )
    return UpkeepWorkers(
        rounds=rounds, small=rounds, large=HelperProcess("millpond-folds", answer_s_max=_LARGE_S_MAX)
    )
