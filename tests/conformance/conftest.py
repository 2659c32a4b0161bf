"""Fixtures for comparing engines: one ZooKeeper for their stores, and Spark with RocksDB state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from tests.fixtures.micro_batches import ROCKSDB, STATE_STORE
from tests.short_lived import COMPILED_PLANS, INTERPRETED_PLANS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_start_or_join = EmbeddedZooKeeper.start_or_join


@pytest.fixture(autouse=True)
def one_zookeeper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Share one server among stores opened without ``zookeeper``: none of these tests is about it."""

    def join(server: EmbeddedZooKeeper) -> str:
        # The shared server itself, which is open to all, starts for whatever asks for it first.
        if server._is_open:
            return _start_or_join(server)
        hosts: str = request.getfixturevalue("zookeeper_hosts")
        return hosts

    monkeypatch.setattr(EmbeddedZooKeeper, "start_or_join", join)


@pytest.fixture
def spark(spark: SparkSession) -> Iterator[SparkSession]:
    """Let Spark interpret its plans: each runs once, on few rows.

    `tests/unit` compiles them, as users do.
    """
    for name, value in INTERPRETED_PLANS.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in COMPILED_PLANS.items():
        spark.conf.set(name, value)


@pytest.fixture
def rocksdb(spark: SparkSession) -> Iterator[SparkSession]:
    spark.conf.set(STATE_STORE, ROCKSDB)
    yield spark
    spark.conf.unset(STATE_STORE)
