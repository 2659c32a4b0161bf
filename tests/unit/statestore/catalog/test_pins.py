"""Version pins that garbage collection must respect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millpond.statestore.catalog.catalog import Catalog, HorizonKind
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock

START_US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_US)


@pytest.fixture
def catalog(clock: ManualClock) -> Iterator[Catalog]:
    with Catalog.open("sqlite://", clock) as opened:
        yield opened


def test_collector_cannot_pass_reader(catalog: Catalog) -> None:
    catalog.publish_horizon("reader", TableVersion(7))
    catalog.publish_horizon("slow reader", TableVersion(5))
    assert catalog.oldest_needed() == 5
    with pytest.raises(ConflictError, match="still needed"):
        catalog.publish_horizon("gc", TableVersion(6), HorizonKind.COLLECTOR)

    catalog.withdraw_horizon("slow reader")
    catalog.publish_horizon("gc", TableVersion(7), HorizonKind.COLLECTOR)
    assert {(entry.holder, entry.version) for entry in catalog.horizons()} == {("gc", 7), ("reader", 7)}


def test_reader_cannot_pin_collected_version(catalog: Catalog) -> None:
    """The horizon of a collector does not fall either."""
    catalog.publish_horizon("gc", TableVersion(7), HorizonKind.COLLECTOR)
    with pytest.raises(ConflictError, match="being collected"):
        catalog.publish_horizon("reader", TableVersion(6))
    with pytest.raises(ConflictError, match="cannot fall"):
        catalog.publish_horizon("gc", TableVersion(6), HorizonKind.COLLECTOR)

    catalog.withdraw_horizon("gc")
    assert len(catalog.horizons()) == 1


def test_silent_reader_expires(catalog: Catalog, clock: ManualClock) -> None:
    catalog.publish_horizon("reader", TableVersion(3), lifetime_ms=1_000)
    clock.advance_ms(999)
    assert catalog.oldest_needed() == 3

    clock.advance_ms(1)
    assert catalog.oldest_needed() is None
    catalog.publish_horizon("gc", TableVersion(9), HorizonKind.COLLECTOR)


def test_withdrawn_reader_holds_nothing(catalog: Catalog) -> None:
    catalog.publish_horizon("reader", TableVersion(3))
    catalog.withdraw_horizon("reader")

    assert catalog.horizons() == ()


def test_collector_does_not_expire(catalog: Catalog) -> None:
    """Its deletions are final, so its horizon has no lifetime."""
    with pytest.raises(InvalidError):
        catalog.publish_horizon("gc", TableVersion(1), HorizonKind.COLLECTOR, lifetime_ms=5)
