"""
The session that Millpond makes, and the daemon that forks its Python workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pytest

from millpond.executor.python_workers.daemon import MODULES
from millpond.executor.spark.session import DAEMON, daemon_settings, spark_has_delta
from millpond.testing.processes.tree import command_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN: Final = {"PYSPARK_PYTHON": sys.executable}
LOOKS: Final = "process long, command string, modules array<string>, threads long, frozen long, drawn double"


def test_a_spark_that_has_deltas_jars_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Delta's jars are resolved unless they are in the folder of jars of the Spark installation.
    """
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "delta-storage-4.4.0.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert not spark_has_delta()

    (jars / "delta-spark_4.2_2.13-4.4.0.jar").touch()
    assert spark_has_delta()

    monkeypatch.delenv("SPARK_HOME")
    assert not spark_has_delta()


@pytest.mark.parametrize(
    ("master", "environment", "platform"),
    [
        ("spark://host:7077", OWN, "linux"),
        ("yarn", OWN, "linux"),
        ("local-cluster[2,1,1024]", OWN, "linux"),
        (None, OWN, "linux"),
        ("local[2]", {"PYSPARK_PYTHON": "python3"}, "linux"),
        ("local[2]", OWN | {"PYSPARK_GATEWAY_PORT": "4040"}, "linux"),
        ("local[2]", OWN, "darwin"),
    ],
)
def test_workers_elsewhere_have_the_daemon_of_pyspark(
    master: str | None, environment: dict[str, str], platform: str
) -> None:
    """
    On a cluster, with Spark Connect, another interpreter, ``spark-submit`` and other systems nothing is set.
    """
    assert daemon_settings(master, environment, platform) == {}


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_workers_of_this_machine_have_ours(master: str) -> None:
    """
    On Linux a local session has its workers forked by the daemon that has imported their modules.
    """
    assert daemon_settings(master, OWN, "linux") == {"spark.python.daemon.module": DAEMON}


def _look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import gc
    import sys
    from pathlib import Path

    import numpy as np

    parent = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
    for batch in batches:
        look = {
            "process": os.getpid(),
            "command": command_of(int(parent)),
            "modules": list(sys.modules),
            "threads": len(list(Path(f"/proc/{parent}/task").iterdir())),
            "frozen": gc.get_freeze_count(),
            "drawn": float(np.random.random()),  # noqa: NPY002 - the generator that NumPy has made at import
        }
        yield pa.RecordBatch.from_pylist([look] * len(batch))


def _looks(spark: SparkSession) -> list[Any]:
    return spark.range(0, 2, 1, 2).mapInArrow(_look, LOOKS).collect()


def test_a_worker_begins_with_its_modules_imported(spark: SparkSession) -> None:
    """
    A worker is a fork of a process of one thread that has all its modules, which the garbage collector leaves alone.
    """
    for look in _looks(spark):
        assert DAEMON in look.command
        assert set(MODULES) <= set(look.modules)
        assert look.threads == 1
        assert look.frozen > 10_000


def test_workers_are_used_again_and_draw_different_numbers(spark: SparkSession) -> None:
    """
    Tasks find the workers of the tasks before; NumPy's generator, as old as the daemon, gives each other numbers.
    """
    first, second = _looks(spark), _looks(spark)

    assert {look.process for look in first} & {look.process for look in second}
    assert len({look.drawn for look in first + second}) == len(first + second)


@pytest.mark.parametrize(("thread", "module"), [("false", DAEMON), ("true", "pyspark.daemon")])
def test_a_daemon_with_a_thread_gives_way_to_that_of_pyspark(thread: str, module: str) -> None:
    """
    Where an import has started a thread, workers are forked by PySpark's daemon, in the same process.
    """
    environment = os.environ | {"JE_ARROW_MALLOC_CONF": f"background_thread:{thread}"}
    with subprocess.Popen(
        [sys.executable, "-m", DAEMON, "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1"},
    ) as daemon:
        assert daemon.stdout is not None
        port = int.from_bytes(daemon.stdout.read(4), "big")
        command = command_of(daemon.pid)
        daemon.communicate()

    assert port > 0
    assert f"-m {module} pyspark.worker" in command
