"""
Python's cycle collector, out of the way while rows are loaded.

Loading makes hundreds of thousands of small objects, none of them a cycle and nearly all of
them there to stay; looking through them again and again took half of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """
    Run a stretch of the engine's own code, never the user's, without collecting cycles.

    Memory is given back by reference counts as ever. Other threads go without as well, so
    the stretch must be short.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
