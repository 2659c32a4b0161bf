"""One ZooKeeper for the stores of all tests that compare engines: none of them is about a store's own server."""

from __future__ import annotations

import pytest

from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper

_start_or_join = EmbeddedZooKeeper.start_or_join


@pytest.fixture(autouse=True)
def one_zookeeper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a store that is opened without ``zookeeper`` use the run's server, which starts with the first of them."""

    def join(_: EmbeddedZooKeeper) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(EmbeddedZooKeeper, "start_or_join", _start_or_join)
            hosts: str = request.getfixturevalue("zookeeper_hosts")
        return hosts

    monkeypatch.setattr(EmbeddedZooKeeper, "start_or_join", join)
