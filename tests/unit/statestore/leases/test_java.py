"""The Java that is found, and its version."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases.zookeeper_process import find_java, java_of_spark, refuse_old_java


def java(home: Path, says: str) -> Path:
    program = home / "bin/java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('java version "1.8.0_402"', "8"),
        ('openjdk version "11.0.2" 2019-01-15', "11"),
        ('x version "16"', "16"),
    ],
)
def test_java_below_17_is_refused(tmp_path: Path, says: str, version: str) -> None:
    """Java 8 calls itself 1.8."""
    program = java(tmp_path, says)

    with pytest.raises(UnavailableError, match=rf"install java 17 .*java=`{program}` version=`{version}`"):
        refuse_old_java(str(program))


@pytest.mark.parametrize("says", ['openjdk version "17.0.9"', 'openjdk version "21"', "no version"])
def test_java_of_unknown_version_is_accepted(tmp_path: Path, says: str) -> None:
    refuse_old_java(str(java(tmp_path, says)))
    refuse_old_java(str(tmp_path))


def test_spark_uses_only_java_home(tmp_path: Path) -> None:
    """The server of a store falls back to the Java on the path."""
    program = java(tmp_path / "jdk", 'openjdk version "17"')
    environment = {"JAVA_HOME": str(tmp_path), "PATH": str(program.parent)}

    assert find_java(environment) == str(program)
    assert java_of_spark({"PATH": str(program.parent)}) == str(program)
    with pytest.raises(UnavailableError, match=f"set JAVA_HOME .*JAVA_HOME=`{tmp_path}`"):
        java_of_spark(environment)
