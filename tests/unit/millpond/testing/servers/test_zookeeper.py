"""Ensembles that do not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.statestore.errors import UnavailableError
from millpond.statestore.leases.zookeeper_process import recorded_server
from millpond.statestore.system import SystemClock
from millpond.testing.servers.zookeeper import Ensemble


def test_failed_ensemble_raises_with_output_of_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with (
        pytest.raises(UnavailableError, match="the ensemble does not start") as caught,
        Ensemble(tmp_path / "data", SystemClock()),
    ):
        pass
    assert caught.value.__notes__ == [f"{index} said last:\ntoo old\n" for index in range(3)]


def test_ensemble_without_quorum_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\nexec sleep 600\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    with pytest.raises(UnavailableError, match="the ensemble does not start"):
        Ensemble(tmp_path / "data", SystemClock(), ready_timeout_ms=300).start()
    members = [recorded_server(tmp_path / "data" / str(index)) for index in range(3)]
    assert [member is not None and member.is_running() for member in members] == [False] * 3
