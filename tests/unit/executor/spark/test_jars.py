"""Pinned checksums of the jars of Delta and S3A."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from millpond.executor.spark import jars
from millpond.executor.spark.jars import check_jars, files_in, read_pins, write_pins
from millpond.executor.spark.session import S3_PACKAGES, spark_jars
from millpond.statestore.errors import DataError


@pytest.fixture
def jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a jar that is the only pinned one."""
    monkeypatch.setattr(jars, "PINS", tmp_path / "pins")
    jar = tmp_path / "delta.jar"
    jar.write_bytes(b"code")
    write_pins([jar])
    return jar


def test_jars_of_the_installed_delta_are_pinned() -> None:
    assert {
        f"delta-spark_4.2_2.13-{version('delta-spark')}.jar",
        f"delta-storage-{version('delta-spark')}.jar",
    } <= {name.removeprefix("io.delta_") for name in read_pins()}


def test_jars_of_s3a_are_pinned_in_the_version_of_sparks_hadoop() -> None:
    [hadoop] = [jar.stem for jar in spark_jars() if jar.name.startswith("hadoop-client-api-")]
    assert f"org.apache.hadoop:hadoop-aws:{hadoop.rpartition('-')[2]}" in S3_PACKAGES
    assert {"{}_{}-{}.jar".format(*package.split(":")) for package in S3_PACKAGES} <= read_pins().keys()


def test_changed_jar_is_refused(jar: Path) -> None:
    check_jars([jar], all_pinned=True)
    jar.write_bytes(b"other code")
    with pytest.raises(DataError, match="not the one that Millpond was tested with"):
        check_jars([jar])


def test_jar_without_a_pin_is_the_users_and_refused_in_setup(jar: Path) -> None:
    other = jar.rename(jar.with_name("users.jar"))
    check_jars([other])
    with pytest.raises(DataError, match="pinned=`None`"):
        check_jars([other], all_pinned=True)


def test_jars_of_this_machine_are_found_in_sparks_list() -> None:
    assert files_in("file:///a/b.jar,file:/c.jar,hdfs://h/d.jar,") == [Path("/a/b.jar"), Path("/c.jar")]
