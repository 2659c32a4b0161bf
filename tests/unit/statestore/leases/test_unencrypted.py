"""The warning about a password without TLS."""

from __future__ import annotations

import pytest

from millpond.statestore.leases.zookeeper_client import OPEN_ENSEMBLE, ZooKeeperSecurity, security_of


def test_user_without_tls_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        security_of("unencrypted:2181", ZooKeeperSecurity(user="shop", password="SECRET"))
    security_of("encrypted:2181", ZooKeeperSecurity(user="shop", password="SECRET", tls=True))
    security_of("open:2181", OPEN_ENSEMBLE)

    (record,) = caplog.records
    assert "a user and no TLS" in record.getMessage()
    assert "hosts=`unencrypted:2181`" in record.getMessage()
    assert "SECRET" not in record.getMessage()
