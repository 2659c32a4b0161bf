"""The allocator of Arrow's data in a process that is Millpond's own: one that keeps little of what is freed.

Such are Spark's Python workers and `millpond run`; in a program that embeds Millpond the choice is the program's. A
superstep decodes many parts of files, one after the other, and keeps a few rows of each. Arrow's default allocator
takes new memory for the next part while it still holds that of the last ones, beyond the memory budget.
"""

from __future__ import annotations

import os
from typing import Final

import pyarrow as pa

_CHOSEN_BY_USER: Final = "ARROW_DEFAULT_MEMORY_POOL"
_FRUGAL: Final = "jemalloc"


def use_frugal_allocator() -> None:
    """From now on allocate Arrow's data of this process with the allocator that keeps least of what is freed.

    Nothing changes where this build of Arrow has not got it, or the user has chosen one by Arrow's own variable.
    """
    if _CHOSEN_BY_USER not in os.environ and _FRUGAL in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())
