"""A daemon that forks a session's Python workers with all imports of a Millpond worker done.

PySpark's own daemon imports next to nothing, because imports may start threads, and a process with threads is not safe
to fork. So each of its workers imports pandas, Arrow and this package again. This daemon imports them without a thread,
and its workers begin at once and share their memory. If an import did start a thread, PySpark's own daemon takes over.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Final

from millpond.statestore.system import seed_forks

MODULES: Final = ("numpy", "pandas", "pyspark.worker", "millpond.executor.spark.task")

_ALLOCATOR: Final = "JE_ARROW_MALLOC_CONF"
"""Options of Arrow's jemalloc, which starts a thread at load time unless they forbid it. It reads them only then."""

_THREADS: Final = Path("/proc/self/task")


def import_modules() -> bool:
    """Import `MODULES`, and return True if this process still has one thread, so that it may be forked.

    The garbage collector then ignores them: PySpark has it search all objects after each task. NumPy starts no threads
    where ``OMP_NUM_THREADS``, set by Spark to the processors of a task, is one.
    """
    is_default = _ALLOCATOR not in os.environ
    if is_default:
        os.environ[_ALLOCATOR] = "background_thread:false"
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)  # of `MODULES`
    gc.freeze()
    gc.enable()
    if is_default:
        del os.environ[_ALLOCATOR]
    return len(list(_THREADS.iterdir())) == 1


def main() -> None:
    """Fork workers until Spark ends. Spark has started this process, and speaks to it by standard input and output."""
    if not import_modules():
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606
    from pyspark.daemon import manager

    seed_forks()
    manager()


if __name__ == "__main__":
    main()
