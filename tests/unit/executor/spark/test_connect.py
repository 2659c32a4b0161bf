"""Refusal of Spark Connect's sessions and frames. Its dependency gRPC is not locked, so stand-ins with the
modules' names replace its classes. With the real classes and a server, `LocalRunner`, `Store.load` and
`to_spark` were found to work.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.replay.replay import replay_on_spark
from millpond.executor.spark.foreach_batch import foreach_batch
from millpond.executor.spark.runner import SparkRunner
from millpond.executor.spark.session import asks_for_connect, refuse_connect, spark_session
from millpond.executor.spark_compat.spark_query import transform_with_state
from millpond.executor.windows.pipeline import Pipeline
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS: Final = pa.table({"k": ["a", "b"], "t": [1_800_000_000_000_000, 1_800_000_001_000_000]})


def _stand_in(module: str, name: str) -> Any:
    """Make an object whose class claims to be in a module of Spark Connect."""
    fields = {
        "__module__": module,
        "__arrow_c_stream__": lambda _, schema=None: ROWS.__arrow_c_stream__(schema),
    }
    return type(name, (), {**fields, "isStreaming": False})()


FRAME: Final = _stand_in("pyspark.sql.connect.dataframe", "DataFrame")
SESSION: Final = _stand_in("pyspark.sql.connect.session", "SparkSession")


def _pipeline(**options: Any) -> Pipeline:
    pipeline = Pipeline("p")
    pipeline.inject("s", key="k", at="t").apply(Computation(), name="c", **options)
    return pipeline


@pytest.mark.parametrize(
    "call",
    [
        lambda path: SparkRunner(path, spark=SESSION),
        lambda path: foreach_batch(path, Computation(), key="k", at="t", spark=SESSION),
        lambda path: _pipeline().foreach_batch(path, into="s", spark=SESSION),
        lambda path: _pipeline().foreach_batch(path, into="s")(FRAME, 0),
        lambda path: replay_on_spark(None, path, _pipeline(), {}, version=0, spark=SESSION),
        lambda path: replay_on_spark(None, path, _pipeline(), {"s": FRAME}, version=0),
        lambda path: transform_with_state(
            FRAME, keys="k", processor=None, output_schema="k string", store=path
        ),
        lambda path: spark_session(options={"spark.remote": "sc://host"}),
    ],
)
def test_spark_connect_is_refused_before_a_store_is_made(tmp_path: Path, call: Callable[[Path], Any]) -> None:
    """The error names the local runner as the way out."""
    with pytest.raises(InvalidError, match=r"not run on Spark Connect: run the job where .* LocalRunner"):
        call(tmp_path / "pond")

    assert not (tmp_path / "pond").exists()


@pytest.mark.spark
def test_run_refuses_frames_as_input_and_as_backfill(spark: SparkSession, tmp_path: Path) -> None:
    runner = SparkRunner(tmp_path / "pond", spark=spark, progress=False)
    with pytest.raises(InvalidError, match=r"not run on Spark Connect.*DataFrame` input=`s`"):
        runner.run(_pipeline(), {"s": FRAME})
    assert not (tmp_path / "pond").exists()

    frame = spark.createDataFrame([("a", 1_800_000_000_000_000)], "k string, t long")
    with pytest.raises(InvalidError, match=r"not run on Spark Connect.*computation=`c` stream=`s`"):
        runner.run(_pipeline(backfill=FRAME), {"s": frame})


def test_pickling_a_foreach_batch_function_is_refused(tmp_path: Path) -> None:
    """Spark Connect pickles the function, perhaps within a closure, and would send it to the server."""
    function = _pipeline().foreach_batch(tmp_path / "pond", into="s")

    def wrapped(frame: Any, batch: int) -> None:
        function(frame, batch)

    for given in (function, wrapped):
        with pytest.raises(InvalidError, match=r"Spark Connect would send it to the server") as refused:
            cloudpickle.dumps(given)
        # PySpark passes this class through; it would replace a PicklingError by another error.
        assert isinstance(refused.value, pickle.PickleError)
        assert not isinstance(refused.value, pickle.PicklingError)


@pytest.mark.parametrize(
    ("options", "environment", "setting"),
    [
        ({}, {}, None),
        ({"spark.remote": "local"}, {}, "spark.remote"),
        ({}, {"SPARK_REMOTE": "sc://host"}, "SPARK_REMOTE"),
        ({}, {"SPARK_CONNECT_MODE_ENABLED": "1"}, "SPARK_CONNECT_MODE_ENABLED"),
        ({"spark.api.mode": "Connect"}, {}, "spark.api.mode"),
        ({"spark.api.mode": "classic"}, {"SPARK_API_MODE": "connect"}, None),
        ({}, {"SPARK_API_MODE": "connect"}, "SPARK_API_MODE"),
    ],
)
def test_settings_that_request_spark_connect_are_recognised(
    options: dict[str, str], environment: dict[str, str], setting: str | None
) -> None:
    """Otherwise the session would be created although nothing can run on it."""
    assert asks_for_connect(options, environment) == setting


def test_other_objects_are_not_taken_for_spark_connect() -> None:
    for given in (None, ROWS, SimpleNamespace(), _stand_in("pyspark.sql.connected", "DataFrame")):
        refuse_connect(given)


def test_local_runner_accepts_frames_of_spark_connect(tmp_path: Path) -> None:
    """They have Arrow's C stream interface."""
    LocalRunner(tmp_path / "pond", progress=False).run(_counting(), {"s": FRAME})
    with Store.open(tmp_path / "pond", read_only=True) as store:
        assert store.rows_view("c").to_arrow()["key"].to_pylist() == ["a", "b"]


class _Counting(Computation):
    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + 1)


def _counting() -> Pipeline:
    pipeline = Pipeline("p")
    pipeline.inject("s", key="k", at="t").apply(_Counting(), name="c")
    return pipeline
