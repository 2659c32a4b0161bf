"""The journal in front of the catalog: order, bounds, errors, closing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import pytest

from millpond.statestore.app_ids import AppId
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.entries import CommitFacts
from millpond.statestore.catalog.journal import CatalogJournal
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import TableVersion, WallTimeMicros


def superstep(number: int) -> CommitFacts:
    txns = {AppId.SUPERSTEP.of("p"): number}
    return CommitFacts(version=TableVersion(number), wall_us=WallTimeMicros(number), txns=txns)


class Gate:
    """A catalog that writes when the test lets it, and fails when the test says so."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.fails = False
        self.entered = threading.Event()
        self.open = threading.Event()

    @property
    def written(self) -> list[int]:
        return [version for batch in self.batches for version in batch]

    def record_commits(self, batch: Iterable[CommitFacts]) -> None:
        self.entered.set()
        self.open.wait(30)
        self.batches.append([facts.version for facts in batch])
        if self.fails:
            raise UnavailableError("the catalog does not answer")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def journal(gate: Gate) -> Iterator[CatalogJournal]:
    made = CatalogJournal(gate, facts_max=3, linger_ms=0)
    yield made
    gate.fails = False
    gate.open.set()
    made.close()


def test_everything_arrives() -> None:
    """What was handed over is in the catalog after a flush, and after closing."""
    with Catalog.open("sqlite://") as catalog:
        with CatalogJournal(catalog, facts_max=8) as journal:
            for number in range(1, 51):
                journal.submit(superstep(number))
            journal.flush()
            assert len(catalog.supersteps()) == 50
            journal.submit(superstep(51))
        assert catalog.supersteps(limit=1)[0].superstep == 51


def test_commits_gather(journal: CatalogJournal, gate: Gate) -> None:
    """Commits submitted during a transaction are written in the next transaction, in order."""
    journal.submit(superstep(1))
    gate.entered.wait(30)
    for number in (2, 3, 4):
        journal.submit(superstep(number))
    gate.open.set()
    journal.flush()

    assert gate.batches == [[1], [2, 3, 4]]


def test_a_full_queue_waits_for_the_writer(journal: CatalogJournal, gate: Gate) -> None:
    """A commit waits while the queue is full, and goes on as soon as it is not."""
    journal.submit(superstep(1))
    gate.entered.wait(30)
    for number in (2, 3, 4):
        journal.submit(superstep(number))
    done = threading.Event()

    def submit_one_more() -> None:
        journal.submit(superstep(5))
        done.set()

    thread = threading.Thread(target=submit_one_more)
    thread.start()
    assert not done.wait(0.05)
    gate.open.set()
    thread.join()
    journal.flush()

    assert gate.written == [1, 2, 3, 4, 5]


def test_an_error_reaches_the_owner_once(journal: CatalogJournal, gate: Gate) -> None:
    """A failed write is raised by the next call, and the journal goes on after it."""
    gate.open.set()
    gate.fails = True
    journal.submit(superstep(1))
    with pytest.raises(UnavailableError):
        journal.flush()
    gate.fails = False
    journal.submit(superstep(2))
    journal.flush()

    assert gate.batches == [[1], [2]]


def test_a_commit_is_taken_although_it_is_told_of_an_error(journal: CatalogJournal, gate: Gate) -> None:
    """A submit that raises the writer's error has queued its commit anyway."""
    gate.fails = True
    journal.submit(superstep(1))
    gate.entered.wait(30)
    for number in (2, 3, 4):
        journal.submit(superstep(number))
    gate.open.set()
    with pytest.raises(UnavailableError):
        # It waits for room, and room comes with the writer's next round, after the failure.
        journal.submit(superstep(5))
    with pytest.raises(UnavailableError):
        journal.flush()

    assert gate.written == [1, 2, 3, 4, 5]


def test_closing_twice_is_closing_once(gate: Gate) -> None:
    """A closed journal takes nothing more, and closing it again is no error."""
    gate.open.set()
    journal = CatalogJournal(gate)
    journal.submit(superstep(1))
    journal.close()
    journal.close()

    assert gate.batches == [[1]]
    with pytest.raises(InvalidError, match="closed"):
        journal.submit(superstep(2))


def test_an_error_at_the_end_is_raised_by_close(gate: Gate) -> None:
    """A write that fails while the journal closes is not swallowed."""
    gate.open.set()
    gate.fails = True
    journal = CatalogJournal(gate)
    journal.submit(superstep(1))
    with pytest.raises(UnavailableError):
        journal.close()
