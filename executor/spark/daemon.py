"""PySpark's daemon, which forks a session's Python workers, with all imported that a worker of Millpond needs.

PySpark's own daemon imports next to nothing, since what is imported may start threads, and a process with threads is
not safe to fork: so each of its workers imports pandas, Arrow and this package again. This daemon has them imported
without a thread, and its workers begin at once and share their memory. Where something did start one, PySpark's own
daemon takes its place.
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
"""What is imported before the first worker is forked."""

_ALLOCATOR: Final = "JE_ARROW_MALLOC_CONF"
"""
Options of one of Arrow's allocators, which is not the default one but starts a thread when it is loaded. It reads them
then and never again.
"""

_THREADS: Final = Path("/proc/self/task")


def import_modules() -> bool:
    """Import `MODULES`, and forget them for the garbage collector, which PySpark has search all objects after each task.

    NumPy starts threads for the processors of a task (``OMP_NUM_THREADS``, from Spark): none where that is one.

    Returns:
        Whether this process still has one thread, so that it may be forked.
    """
    is_default = _ALLOCATOR not in os.environ
    if is_default:
        os.environ[_ALLOCATOR] = "background_thread:false"
    gc.disable()
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    if is_default:
        del os.environ[_ALLOCATOR]
    return len(list(_THREADS.iterdir())) == 1


def main() -> None:
    """Fork workers until Spark ends: as the process that Spark has started, with its standard input and output."""
    if not import_modules():
        os.execv(sys.executable, [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]])  # noqa: S606
    from pyspark.daemon import manager

    seed_forks()
    manager()


if __name__ == "__main__":
    main()
