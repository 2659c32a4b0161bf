"""The machine's clock, randomness and cycle collector, and retries, which wait on the clock.

No other module may use ``time`` or ``random``, or draw a UUID; `tests/test_tidy.py` bans them elsewhere.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import Clock, Rng, WallTimeMicros

_Result = TypeVar("_Result")


class SystemClock:
    """The machine's `Clock`."""

    def now_us(self) -> WallTimeMicros:
        return WallTimeMicros(time.time_ns() // 1_000)

    def monotonic_us(self) -> int:
        return time.monotonic_ns() // 1_000

    def sleep_ms(self, duration_ms: float) -> None:
        time.sleep(duration_ms / 1_000)


def thread_time_us() -> int:
    """Return the processor time of this thread in microseconds."""
    return time.thread_time_ns() // 1_000


class SystemRng:
    """The machine's `Rng`; tokens come from the operating system, so forked workers never draw the same one."""

    def random(self) -> float:
        return random.random()

    def token(self) -> str:
        return os.urandom(16).hex()


def seed_forks() -> None:
    """Reseed NumPy's global generator in forked processes, which would otherwise all draw the same numbers.

    Python reseeds its own generator.
    """
    import numpy as np

    os.register_at_fork(after_in_child=np.random.seed)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run engine code, never the user's, without collecting cycles.

    A load, a plan or a commit makes hundreds of thousands of small objects without a cycle, and scanning them
    repeatedly took half of the time. Reference counts still release memory. The pause affects all threads, so it
    must be short.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_YOUNG_OBJECTS: Final = 10_000


class _SlowCollector:
    """How many threads want the collector slowed, and its thresholds before the first of them."""

    lock = threading.Lock()
    wanted = 0
    thresholds = (0, 0, 0)


@contextmanager
def collector_slowed() -> Iterator[None]:
    """Run user code, looking for cycles after 10,000 new objects rather than Python's 700.

    A bundle makes objects for each record and drops them at once. Every search counts the few that are in use as old,
    and enough old objects cause a search of the whole process, which took a sixth of the time. Cycles are still found, so
    memory stays bounded. Threads may overlap; a program that has chosen higher thresholds, or none, keeps them.
    """
    slow = _SlowCollector
    with slow.lock:
        if not slow.wanted:
            young, *older = slow.thresholds = gc.get_threshold()
            if 0 < young < _YOUNG_OBJECTS:
                gc.set_threshold(_YOUNG_OBJECTS, *older)
        slow.wanted += 1
    try:
        yield
    finally:
        with slow.lock:
            slow.wanted -= 1
            if not slow.wanted:
                gc.set_threshold(*slow.thresholds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Bounds of retries: attempts at one operation of the object store, and waits that double between them.

    ``versions_max`` bounds how many versions a commit may lose to other writers.
    """

    tries: int = 5
    delay_ms: float = 10.0
    delay_ms_max: float = 1_000.0
    versions_max: int = 100


def retrying(action: Callable[[], _Result], policy: RetryPolicy, clock: Clock, rng: Rng) -> _Result:
    """Run an idempotent action, such as a read or a put-if-absent of the same bytes, until the store is available."""
    delay_ms = policy.delay_ms
    for _ in range(policy.tries - 1):
        try:
            return action()
        except UnavailableError:
            # Jitter the wait, so that writers that failed together do not come back together.
            clock.sleep_ms(delay_ms * (0.5 + rng.random() / 2))
            delay_ms = min(delay_ms * 2, policy.delay_ms_max)
    return action()
