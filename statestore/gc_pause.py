"""Pauses Python's cycle collector while the engine makes many values: rows that it loads, a plan, a commit.

That is up to hundreds of thousands of small objects, none of them in a cycle. Scanning them, and all that the
process has, again and again took half of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
