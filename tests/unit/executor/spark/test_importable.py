"""The user's modules that Spark's workers cannot import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.worker_process import own_modules
from millpond.statestore.errors import InvalidError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MODULE = "millpond_test_next_to_the_program"
SOURCE = """
import millpond as mp


class Counter(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


def key(row):
    return row["k"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import a module from a folder that only this process searches."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module(MODULE)
    del sys.modules[MODULE]


def test_modules_that_are_not_installed_are_found(module: Any) -> None:
    """The code refers to a class, to a function, or to a module within a function."""

    def uses_module(row: Any) -> Any:
        return helper.key(row)

    helper = module

    assert own_modules(cloudpickle.dumps({"c": module.Counter(), "d": module.Counter()})) == (MODULE,)
    assert own_modules(cloudpickle.dumps([module.key, "text", module.key])) == (MODULE,)
    uses_module.__module__ = "__main__"
    assert own_modules(cloudpickle.dumps([uses_module, uses_module])) == (MODULE,)


def test_installed_modules_are_not_reported() -> None:
    import pyarrow as pa

    assert own_modules(cloudpickle.dumps([Path("x"), pa.array([1]), EnginePipeline, "os", len])) == ()


@pytest.mark.spark
def test_module_that_workers_cannot_import_is_refused_before_the_run(
    spark: SparkSession, tmp_path: Path, module: Any
) -> None:
    """No store is made."""
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(module.Counter(), name="c")
    frame = spark.createDataFrame([("a", 1)], "k string, t long")

    with pytest.raises(InvalidError, match=rf"cannot import a module.*addPyFile module=`{MODULE}`"):
        SparkRunner(tmp_path / "pond", spark=spark, progress=False).run(pipeline, {"in": frame})
    assert not (tmp_path / "pond").exists()
