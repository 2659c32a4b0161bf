"""The memory allocator of worker processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pyarrow as pa

_PROGRAM = """
import pyarrow as pa
from millpond.executor.spark.worker_process import use_frugal_allocator
use_frugal_allocator()
print(pa.default_memory_pool().backend_name)
"""


def allocator_of_a_worker(**environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "ARROW_DEFAULT_MEMORY_POOL"}
    command = [sys.executable, "-c", _PROGRAM]
    return subprocess.run(
        command, env=inherited | environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_workers_use_jemalloc_where_arrow_has_it() -> None:
    """The choice is global, so it is tested in another process; jemalloc retains the least memory."""
    has_jemalloc = "jemalloc" in pa.supported_memory_backends()
    assert allocator_of_a_worker() == ("jemalloc" if has_jemalloc else pa.default_memory_pool().backend_name)


def test_allocator_chosen_by_the_user_is_kept() -> None:
    """Arrow's own environment variable names it."""
    assert allocator_of_a_worker(ARROW_DEFAULT_MEMORY_POOL="system") == "system"
