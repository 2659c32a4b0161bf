"""The real clock and the real randomness; no other module may touch either.

They sit in the lowest layer because the store needs them as well as the
runners; `tests/test_tidy.py` bans ``time``, ``random`` and ``uuid`` elsewhere.

Pauses Python's cycle collector while the engine makes many values: rows that it loads, a plan, a commit.

That is up to hundreds of thousands of small objects, none of them in a cycle. Scanning them, and all that the
process has, again and again took half of the time.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.statestore.types import WallTimeMicros


class SystemClock:
    """The machine's `Clock`."""

    def now_us(self) -> WallTimeMicros:
        """Wall time in microseconds since 1970 UTC."""
        return WallTimeMicros(time.time_ns() // 1_000)

    def monotonic_us(self) -> int:
        """Microseconds on the machine's monotonic clock."""
        return time.monotonic_ns() // 1_000

    def sleep_ms(self, duration_ms: float) -> None:
        """Block the calling thread for ``duration_ms`` milliseconds."""
        time.sleep(duration_ms / 1_000)


def thread_time_us() -> int:
    """Microseconds for which a processor has run this thread."""
    return time.thread_time_ns() // 1_000


class SystemRng:
    """The machine's `Rng`; tokens come from the operating system, so forked workers never draw the same one."""

    def random(self) -> float:
        """A uniformly distributed number in [0, 1)."""
        return random.random()

    def token(self) -> str:
        """32 hexadecimal digits from the operating system's random source."""
        return os.urandom(16).hex()


def seed_forks() -> None:
    """Have each process that this one forks draw numbers of its own from NumPy's generator, which is made at import.

    Python's own generator sees to that by itself.
    """
    import numpy as np

    os.register_at_fork(after_in_child=np.random.seed)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run engine code, never the user's, without collecting cycles.

    Reference counts release memory as usual. The pause affects all threads, so it must be short.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
