"""Pins of the version that a reader uses."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.statestore.catalog import catalog as reading_module
from millpond.statestore.catalog.catalog import READER_LIFETIME_MS, Catalog, HorizonKind, Reading
from millpond.statestore.errors import ConflictError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.store import Store
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.commit_requests import fence_request


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def catalog(clock):
    with Catalog.open("sqlite://", clock) as opened:
        yield opened


def collect_up_to(catalog: Catalog, version: int) -> None:
    catalog.publish_horizon("gc", TableVersion(version), HorizonKind.COLLECTOR)


def test_version_is_pinned_while_read(catalog):
    """The thread that renews the pin ends with the read."""
    before = set(threading.enumerate())
    with Reading(catalog, "me", TableVersion(7)):
        with pytest.raises(ConflictError):
            collect_up_to(catalog, 8)
        collect_up_to(catalog, 7)
    collect_up_to(catalog, 8)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "millpond-reading"]


def test_version_under_collection_is_refused(catalog):
    """The refusal comes before the first read."""
    collect_up_to(catalog, 8)
    with pytest.raises(ConflictError):
        Reading(catalog, "me", TableVersion(7))


def test_slow_reader_renews_its_horizon(catalog, clock, monkeypatch):
    renewed = threading.Event()
    monkeypatch.setattr(reading_module, "_RENEWALS", READER_LIFETIME_MS)
    with Reading(catalog, "me", TableVersion(7)) as held:
        for _ in range(3):
            clock.advance_ms(READER_LIFETIME_MS - 1)
            renew = held.renew
            monkeypatch.setattr(held, "renew", lambda renew=renew: (renew(), renewed.set()))
            assert renewed.wait(10)
            renewed.clear()
            monkeypatch.setattr(held, "renew", renew)
        with pytest.raises(ConflictError):
            collect_up_to(catalog, 8)
        held.check()


def test_reader_with_expired_horizon_fails(catalog, clock):
    """A collector may have deleted its files."""
    with Reading(catalog, "me", TableVersion(7)) as held:
        clock.advance_ms(READER_LIFETIME_MS + 1)
        collect_up_to(catalog, 8)
        with pytest.raises(ConflictError):
            held.renew()


@pytest.mark.parametrize("read_only", [False, True])
def test_read_only_store_publishes_its_horizon(tmp_path, clock, read_only):
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond",
        clock=clock,
        leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer),
    ) as store:
        store.committer.commit(fence_request(1, Interval("c")))
        assert store.catalog is not None
        reader = Store.open(tmp_path / "pond", clock=clock, read_only=True) if read_only else store
        with reader.reading(0) as snapshot:
            assert snapshot.version == 0
            assert store.catalog.oldest_needed() == 0
            with reader.reading() as newest:
                assert newest.version == 1
        assert store.catalog.oldest_needed() is None


def test_store_without_catalog_is_readable(tmp_path, clock):
    """No version can be pinned, and no catalog is created."""
    with Store.in_memory(clock=clock) as store, store.reading() as snapshot:
        assert snapshot.version == 0
    registry = MemoryRegistry()
    Store.open(
        tmp_path / "pond",
        clock=clock,
        leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer),
    ).close()
    with Store.open(tmp_path / "pond", clock=clock, read_only=True) as store, store.reading() as snapshot:
        assert snapshot.version == 0
    assert not (tmp_path / "pond" / "catalog.sqlite").exists()


def test_read_only_catalog_does_not_prevent_reading(tmp_path, clock, monkeypatch):
    """A version under collection is still refused."""
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond",
        clock=clock,
        leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer),
    ) as store:
        store.committer.commit(fence_request(1, Interval("c")))
        assert store.catalog is not None
        collect_up_to(store.catalog, 1)
        with pytest.raises(ConflictError), store.reading(0):
            pass

        def refuse(*_arguments: object, **_options: object) -> None:
            raise UnavailableError("the catalog does not answer")

        monkeypatch.setattr(Catalog, "publish_horizon", refuse)
        with store.reading() as snapshot:
            assert snapshot.version == 1


def test_command_reads_version_behind_horizon_with_warning(tmp_path, clock):
    """Its files stay readable until they are deleted."""
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond",
        clock=clock,
        leases=lambda _, writer: MemoryLeases(registry, clock, writer_id=writer),
    ) as store:
        store.committer.commit(fence_request(1, Interval("c")))
        assert store.catalog is not None
        collect_up_to(store.catalog, 1)
    asked = ["sql", str(tmp_path / "pond"), "select 1 as one", "--version", "0", "--json"]
    result = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert result.exit_code == 0
    assert '{"one":1}' in result.stdout
    assert "may be deleted at any moment" in result.stderr
