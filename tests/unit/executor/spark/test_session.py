"""
The session that Millpond makes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.executor.spark.session import spark_has_delta


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
