"""Standby processes take over from owners that are killed or stopped, one after another."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from tests.processes.relay import Relay

pytestmark = pytest.mark.fault


def test_standbys_follow_killed_or_stopped_owners(tmp_path: Path, zookeeper_hosts: str) -> None:
    """A resumed owner is fenced, and every acknowledged record is present once."""
    path = tmp_path / "pond"
    Store.open(path, zookeeper=zookeeper_hosts).close()
    with Relay(path, zookeeper_hosts, 1_000, SystemClock()) as relay:
        handovers = [relay.hand_over(number) for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL)]
        acknowledged, lost, repeated = relay.finish()

    assert [handover.fenced for handover in handovers] == [None, True, None]
    assert acknowledged >= 4
    assert (lost, repeated) == (0, 0)
