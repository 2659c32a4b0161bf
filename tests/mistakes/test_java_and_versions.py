"""Mistakes with the machine: Java is missing or old, or Spark and Python have other versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException

import millpond as mp
from millpond.executor.spark.session import check_home
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, counting, held_in_memory, run
from tests.tidy import ROOT

OLD_JAVA = """\
#!/bin/sh
echo 'openjdk version "11.0.2" 2019-01-15' >&2
exit 1
"""
SESSION = """\
import millpond as mp
try:
    mp.spark_session(master="local[1]")
except mp.MillpondError as error:
    print(type(error).__name__, error, sep="\\t")
"""


@pytest.fixture
def old_java(tmp_path: Path) -> Path:
    """A Java home that reports a version of 2018."""
    java = tmp_path / "jdk/bin/java"
    java.parent.mkdir(parents=True)
    java.write_text(OLD_JAVA)
    java.chmod(0o755)
    return tmp_path / "jdk"


@pytest.mark.mistake("java-missing")
def test_machine_without_java(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without an ensemble needs Java for its own ZooKeeper, and so does Spark."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    with told.by_error("JAVA_HOME"):
        mp.Store.open(tmp_path / "pond")


@pytest.mark.mistake("java-too-old")
def test_java_too_old_for_spark(told: Told, old_java: Path) -> None:
    """Spark reports only that its gateway process exited."""
    told.by_text(*_session_with(JAVA_HOME=str(old_java)), old_java, "11")


@pytest.mark.mistake("java-home-wrong")
def test_java_home_without_java(told: Told, tmp_path: Path) -> None:
    """Spark looks nowhere else if ``JAVA_HOME`` is set."""
    told.by_text(*_session_with(JAVA_HOME=str(tmp_path)), tmp_path)


def _session_with(**environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SESSION],
        check=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    kind, _, text = done.stdout.strip().partition("\t")
    return kind, text


@pytest.mark.mistake("spark-of-another-version")
def test_spark_home_of_another_version(told: Told, tmp_path: Path) -> None:
    """The Python package and the jars must match."""
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars/spark-core_2.12-3.5.1.jar").touch()

    with told.by_error(tmp_path, "3.5.1", "4.2"):
        check_home({"SPARK_HOME": str(tmp_path)})


class Undelta:
    """A double of a session without Delta, with Spark's answers."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> Any:
        return self

    def load(self, _: str) -> Any:
        raise AnalysisException("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta.")


@pytest.mark.mistake("session-without-delta")
def test_session_without_delta(told: Told, tmp_path: Path) -> None:
    """A view uses Delta's reader; a real session without it would take ten seconds."""
    with mp.Store.open(tmp_path / "pond", leases=held_in_memory()) as store:
        run(counting(), ROWS, store)
        with told.by_error(tmp_path / "pond"):
            store.rows_view("counter").to_spark(Undelta())  # type: ignore[arg-type]
