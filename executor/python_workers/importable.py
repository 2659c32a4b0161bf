"""Whether Spark's workers can import the modules that a pipeline's code comes from.

Code of the main program travels with the pipeline; code of modules travels by name, and the workers import it. A
module next to the program is found by the driver but not always by them, which they would say in a long trace in the
middle of the first superstep.
"""

from __future__ import annotations

import importlib
import pickletools
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import cloudpickle
import pyarrow as pa

from millpond.executor.pipeline.topology import Topology
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TASKS_MAX: Final = 64
_KNOWN_MAX: Final = 1_000
_LOADER_NAME: Final = "subimport"
_LOADER: Final = "\0the function of cloudpickle that imports a module"
_FAILURES: Final = "module string, reason string"
_known: set[tuple[str, tuple[str, ...]]] = set()
"""Modules that the workers of a running application have imported already."""


def check_importable(spark: SparkSession, topology: Topology) -> None:
    """Let the workers import the modules of a pipeline's code that are not installed; costs a job if there are any.

    The job is like those of supersteps: Spark starts other workers for other kinds of jobs.

    Args:
        spark: the session that runs the pipeline.
        topology: the checked pipeline.

    Raises:
        InvalidError: names the module that a worker cannot import.
    """
    modules = own_modules(cloudpickle.dumps((dict(topology.computations), dict(topology.injectors))))
    asked = (str(spark.sparkContext.applicationId), modules)
    if not modules or asked in _known:
        return
    tasks = min(spark.sparkContext.defaultParallelism, _TASKS_MAX)
    asking = spark.range(0, tasks, 1, tasks).mapInArrow(partial(_import_failures, modules), _FAILURES)
    for failure in asking.toArrow().to_pylist():
        raise import_error(failure["module"], failure["reason"])
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    _known.add(asked)


def _import_failures(modules: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The first of the modules that this worker cannot import, if any."""
    for _ in batches:
        continue  # Spark ends a worker that leaves rows unread
    failure = next(filter(None, map(_import_failure, modules)), None)
    if failure is not None:
        yield pa.RecordBatch.from_pylist([dict(zip(("module", "reason"), failure, strict=True))])


def _import_failure(module: str) -> tuple[str, str] | None:
    """The name of a module and why it cannot be imported; ``None`` if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - a module of the user's may raise anything
        return module, f"{type(error).__name__}: {error}"
    return None


def import_error(module: str | None, reason: object) -> InvalidError:
    """The error of code that a worker cannot import."""
    return InvalidError(
        "a worker of Spark cannot import a module of the pipeline's code: install it there, "
        "or give it to Spark before the run with spark.sparkContext.addPyFile",
        module=module,
        reason=reason,
    )


def own_modules(pickled: bytes) -> tuple[str, ...]:
    """The modules that pickled objects come from and that are not installed where Python finds its packages."""
    return tuple(sorted(name for name in set(_modules(pickled)) if _is_own(name)))


def _modules(pickled: bytes) -> Iterator[str]:
    """The modules that unpickling imports: those of the classes and functions, and those that cloudpickle loads by name."""
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
    return any(not _is_installed(Path(place)) for place in places)


def _is_installed(place: Path) -> bool:
    homes = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    return any(place.is_relative_to(home) for home in homes)
