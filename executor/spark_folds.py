"""
Folds as Spark jobs: each is one task in some executor's Python worker, started by a thread of the driver.

A task opens the store for itself, as a superstep's does, and answers with what it wrote. It is pure
towards the store: one that is repeated, speculated or cancelled leaves a file that no commit names,
and that is an orphan. Whether a fold lands is the driver's commit alone.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from millpond.gc.fold import Folded, FoldRules, fold_files
from millpond.gc.fold_plan import Fold
from millpond.statestore.errors import MillpondError, UnavailableError
from millpond.statestore.objects import open_objects
from millpond.statestore.row import Fence
from millpond.statestore.system import SystemRng

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = ["POOL", "FoldTask", "SparkFolds"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

POOL: Final = "millpond-folds"
"""Spark's scheduler pool of folds; with ``spark.scheduler.mode=FAIR`` a fairscheduler file may give it a weight."""

_AT_ONCE: Final = 2
"""Jobs at a time: a large interval must not keep the others waiting, and most slots are the supersteps'."""
