"""A Python worker process between tasks: the store, the code, and soft state of its intervals.

All of it can be rebuilt at any time. Soft state is trusted only for committed files that this process wrote or read
itself, which `IntervalWorker` checks. Several threads share it: Spark's main thread, and threads that serve slots
for other processes. One thread at a time runs an interval.

Code of the main program travels with the pipeline, but code of modules travels by name and must be importable by the
workers. `check_importable` finds a missing module before the first superstep.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickletools
import platform
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import cloudpickle
import pyarrow as pa

from millpond.executor.computation.watchdog import OnStuck
from millpond.executor.interval.bundle import Bundle, Deliveries, IntervalPlan
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_update import Manifest
from millpond.executor.interval.worker import IntervalWorker
from millpond.executor.pipeline.nodes import STRONG, ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.spark.hand_over import Serve, SlotHomes
from millpond.executor.spark.task_plan import TaskPlan, WorkerSetting
from millpond.executor.superstep.delivery import ProductionSource, read_productions
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.objects.ranges import MeteredObjects
from millpond.statestore.rows.pages import PAGE_INDEXES
from millpond.statestore.system import SystemClock, SystemRng, thread_time_us

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_TASKS_MAX: Final = 64
_KNOWN_MAX: Final = 1_000
_LOADER_NAME: Final = "subimport"
_LOADER: Final = "\0the function of cloudpickle that imports a module"
_FAILURES: Final = "module string, reason string"
_known: set[tuple[str, tuple[str, ...]]] = set()
"""Modules that the workers of a running application can import, by application."""


def check_importable(spark: SparkSession, topology: Topology) -> None:
    """Raise unless the workers can import the modules of the pipeline's code. Installed modules are not checked.

    A check costs a Spark job, of the same kind as a superstep because Spark starts other workers for other kinds.
    """
    modules = own_modules(cloudpickle.dumps((dict(topology.computations), dict(topology.injectors))))
    asked = (str(spark.sparkContext.applicationId), modules)
    if not modules or asked in _known:
        return
    tasks = min(spark.sparkContext.defaultParallelism, _TASKS_MAX)
    asking = spark.range(0, tasks, 1, tasks).mapInArrow(partial(_import_failures, modules), _FAILURES)
    for failure in asking.toArrow().to_pylist():
        raise _import_error(failure["module"], failure["reason"])
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    _known.add(asked)


def _import_failures(modules: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        continue  # Spark ends a worker that leaves rows unread
    for module in modules:
        try:
            importlib.import_module(module)  # of the pipeline itself
        except Exception as error:  # noqa: BLE001 - a user's module may raise anything
            failure = {"module": module, "reason": f"{type(error).__name__}: {error}"}
            yield pa.RecordBatch.from_pylist([failure])
            return


def _import_error(module: str | None, reason: object) -> InvalidError:
    return InvalidError(
        "a worker of Spark cannot import a module of the pipeline's code: install it there, "
        "or give it to Spark before the run with spark.sparkContext.addPyFile",
        module=module,
        reason=reason,
    )


def own_modules(pickled: bytes) -> tuple[str, ...]:
    """Return the modules of pickled objects that are not installed among Python's packages."""
    return tuple(sorted(name for name in set(_modules(pickled)) if _is_own(name)))


def _modules(pickled: bytes) -> Iterator[str]:
    """Yield the modules of classes and functions, and the modules that cloudpickle imports by name."""
    texts: list[str] = []
    memo: list[str] = []
    top, is_loading = "", False
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name == "MEMOIZE":
            memo.append(top)
            continue
        if operation.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            yield module
            top = _LOADER if name == _LOADER_NAME else ""
        elif operation.name == "STACK_GLOBAL":
            yield texts[-2]
            top = _LOADER if texts[-1] == _LOADER_NAME else ""
        elif operation.name in {"BINGET", "LONG_BINGET"} and isinstance(argument, int):
            top = memo[argument] if argument < len(memo) else ""
        else:
            top = argument if isinstance(argument, str) else ""
        if top == _LOADER:
            is_loading = True
        elif top:
            texts.append(top)
            if is_loading:
                yield top
            is_loading = False


def _is_own(module: str) -> bool:
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names or root in {"millpond", "__main__", "pyspark"}:
        return False
    try:
        spec = find_spec(root)
    except (ImportError, ValueError):
        return False
    places = (
        [spec.origin] if spec and spec.origin else list(spec.submodule_search_locations or ()) if spec else []
    )
    homes = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    return not all(any(Path(place).is_relative_to(home) for home in homes) for place in places)


_CHOSEN_BY_USER: Final = "ARROW_DEFAULT_MEMORY_POOL"
_FRUGAL: Final = "jemalloc"


def use_frugal_allocator() -> None:
    """Allocate Arrow's data in this process with the allocator that keeps the least freed memory.

    A superstep decodes many parts of files in turn and keeps a few rows of each. Arrow's default allocator takes new
    memory for the next part while it still holds the last ones, beyond the memory budget. Without this allocator in
    Arrow, or with the user's choice in Arrow's variable, nothing changes. Only for processes that belong to Millpond:
    Spark's Python workers and `millpond run`.
    """
    if _CHOSEN_BY_USER not in os.environ and _FRUGAL in pa.supported_memory_backends():
        pa.set_memory_pool(pa.jemalloc_memory_pool())


_INTERVALS_MAX: Final = 4_096
_READING_SHARE: Final = 16
"""The divisor of the budget that leaves room for pages during a read."""


@dataclass(slots=True)
class _Kept:
    worker: IntervalWorker
    lock: threading.Lock = field(default_factory=threading.Lock)
    on_stuck: OnStuck | None = None


class WorkerProcess:
    """This process, for one store and one pipeline's code."""

    _current: WorkerProcess | None = None
    _choosing = threading.Lock()

    def __init__(self, setting: WorkerSetting) -> None:
        self.setting: WorkerSetting = setting
        self.name: str = f"{platform.node()}/{os.getpid()}"
        try:
            nodes: Mapping[str, ComputationNode] = cloudpickle.loads(setting.code)  # the driver's own
            self.nodes = nodes
        except ImportError as failure:
            # This worker may be younger than the run, so `check_importable` has not asked it.
            raise _import_error(failure.name, failure) from failure
        store = open_objects(setting.url, setting.storage_options, durability=setting.durability)
        self._metered = MeteredObjects(store)
        self._objects = setting.disk.tier_of(store, SystemClock(), below=self._metered)
        self._kept: dict[Interval, _Kept] = {}
        self._keeping = threading.Lock()
        reading = setting.cache_bytes // _READING_SHARE
        self._memory = MemoryBudget(setting.cache_bytes, lambda: PAGE_INDEXES.size_bytes + reading)
        self._rng = SystemRng()
        self._homes: SlotHomes | None = None

    @classmethod
    def of(cls, setting: WorkerSetting) -> WorkerProcess:
        """Return the process of a setting, and drop the soft state of another setting."""
        # Tasks in several threads must share one process, because two would cache the same rows twice.
        with cls._choosing:
            current = cls._current
            if current is not None and current.setting.name == setting.name:
                return current
            if current is not None:
                current.close()
            use_frugal_allocator()
            cls._current = WorkerProcess(setting)
            # Modules and code stay, but PySpark's collection after each task would search them, 40 ms with a worker's
            # imports. Workers of `daemon` begin frozen, but on a cluster PySpark's own daemon forks them.
            gc.collect()
            gc.freeze()
            return cls._current

    def homes(self, secret: str, serve: Serve, executor: int) -> SlotHomes:
        """Return the slots whose home is this process in a run. It gives up slots of an earlier run."""
        if self._homes is None or self._homes.secret != secret:
            self.close()
            self._homes = SlotHomes(secret, serve, executor)
        return self._homes

    def close(self) -> None:
        if self._homes is not None:
            self._homes.close()
            self._homes = None

    def abandon(self) -> None:
        """Start the next task from nothing, because user code is stuck and may still use this object."""
        cls = type(self)
        if cls._current is self:
            cls._current = None
        self.close()

    @property
    def read_bytes(self) -> int:
        """Bytes of row files that this thread has read from the store. Reads from the disk tier do not count."""
        return self._metered.read_bytes

    def productions(self, source: ProductionSource) -> pa.Table:
        return read_productions(self._objects, [source])

    def run(
        self,
        plan: TaskPlan,
        part: IntervalPlan,
        node: ComputationNode,
        deliveries: Sequence[Deliveries],
        on_stuck: OnStuck | None = None,
    ) -> Manifest:
        """Process one interval's bundle and write its row file, uncommitted.

        ``on_stuck`` is called if user code exceeds its time limit and cannot be interrupted.
        """
        weak = plan.weak.get(node.name, STRONG)
        bundle = Bundle(
            plan=part, deliveries=deliveries, superstep=plan.superstep, wall_time=plan.wall_time, weak=weak
        )
        kept = self._keep(node, part.interval)
        with kept.lock:
            kept.on_stuck = on_stuck
            manifest = kept.worker.run(bundle, lambda: part.files, self._rng.token())
        if self._memory.is_exceeded:
            with self._keeping:
                others = list(self._kept.values())
            # Shrink the soft state of idle intervals to their shares. Skip intervals that run now: waiting for their
            # user code would stall this task.
            for other in others:
                if self._memory.is_exceeded and other.lock.acquire(blocking=False):
                    try:
                        other.worker.shrink()
                    finally:
                        other.lock.release()
        return replace(manifest, home=self.name)

    def sync(self) -> None:
        self._objects.sync()

    def _keep(self, node: ComputationNode, interval: Interval) -> _Kept:
        with self._keeping:
            kept = self._kept.get(interval)
            if kept is None:
                # Intervals of a computation never overlap: a split or a merge has replaced any that do.
                for known in [known for known in self._kept if known.overlaps(interval)]:
                    self._kept.pop(known).worker.leave()
                if len(self._kept) >= _INTERVALS_MAX:
                    self._kept.pop(next(iter(self._kept))).worker.leave()
                worker = IntervalWorker(
                    node,
                    interval,
                    self._objects,
                    memory=self._memory,
                    stopwatch=thread_time_us,
                    on_stuck=partial(self._tell_stuck, interval),
                )
                kept = self._kept[interval] = _Kept(worker)
            return kept

    def _tell_stuck(self, interval: Interval, error: InvalidError) -> None:
        kept = self._kept.get(interval)
        self.abandon()
        if kept is not None and kept.on_stuck is not None:
            kept.on_stuck(error)
