"""The catalog: what is recorded is read back, bounded, never set back, and made again from the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.statestore.app_ids import AppId
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.catalog.entries import (
    CatalogLimits,
    ComputationDefinition,
    PipelineDefinition,
)
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import (
    CommitNumber,
    EventTimeMicros,
    Sequencer,
    Superstep,
    TableVersion,
)
from millpond.testing.fixtures.commit_history import (
    ALL,
    DEFINITION,
    LEFT,
    RIGHT,
    CommitHistory,
    busy_history,
    everything,
    packed_fence,
)
from millpond.testing.fixtures.determinism import ManualClock

START_US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_US)


@pytest.fixture
def catalog(clock: ManualClock) -> Iterator[Catalog]:
    with Catalog.open("sqlite://", clock) as opened:
        yield opened


class TestOpening:
    def test_the_default_is_a_file_in_the_stores_folder(self, tmp_path: Path) -> None:
        """What one process records in the store's folder another reads there."""
        folder = tmp_path / "a pond % @ ü"
        folder.mkdir()
        with Catalog.open(default_catalog_url(str(folder))) as first:
            first.record_pipeline(DEFINITION)

        with Catalog.open(default_catalog_url(str(folder))) as second:
            assert [entry.name for entry in second.computations()] == ["counter", "spikes"]
        assert (folder / "catalog.sqlite").exists()

    def test_a_database_that_is_away_is_unavailable(self, tmp_path: Path) -> None:
        """A database that cannot be reached raises UnavailableError."""
        with pytest.raises(UnavailableError, match="does not answer"):
            Catalog.open(f"sqlite:///{tmp_path}/nowhere/catalog.sqlite")

    @pytest.mark.parametrize("url", ["no url", "nosuchdatabase://host/x"])
    def test_an_unusable_url_is_invalid(self, url: str) -> None:
        """A URL that no driver serves raises InvalidError."""
        with pytest.raises(InvalidError):
            Catalog.open(url)

    def test_a_file_that_is_no_database_is_a_data_error(self, tmp_path: Path) -> None:
        """Bytes that are not a catalog are named as damaged, with the way out."""
        (tmp_path / "catalog.sqlite").write_bytes(b"not a database" * 500)

        with pytest.raises(DataError, match="rebuilt from the log"):
            Catalog.open(default_catalog_url(str(tmp_path)))

    def test_another_stores_catalog_is_refused(self, tmp_path: Path) -> None:
        """A catalog that one store has claimed is not opened for another."""
        url = default_catalog_url(str(tmp_path))
        Catalog.open(url).close()
        Catalog.open(url, store_id="pond-1").close()
        Catalog.open(url, store_id="pond-1").close()

        with pytest.raises(InvalidError, match="another store"):
            Catalog.open(url, store_id="pond-2")

    def test_read_only_makes_no_file(self, tmp_path: Path) -> None:
        """Opening read-only does not create a missing catalog."""
        with pytest.raises(UnavailableError):
            Catalog.open(default_catalog_url(str(tmp_path)), read_only=True)
        assert list(tmp_path.iterdir()) == []

    def test_read_only_reads(self, tmp_path: Path) -> None:
        """A read-only catalog reads while another process records, and refuses to record."""
        url = default_catalog_url(str(tmp_path))
        with Catalog.open(url) as writer, Catalog.open(url, read_only=True) as reader:
            writer.record_commits(busy_history().commits)

            assert everything(writer) == everything(reader)
            with pytest.raises(UnavailableError):
                reader.record_pipeline(DEFINITION)

    def test_the_age_is_known(self, catalog: Catalog, clock: ManualClock) -> None:
        """The catalog knows since when it is kept."""
        clock.advance_ms(10)

        assert catalog.created_us == 1_000_000

    def test_limits_must_keep_something(self) -> None:
        """A bound of zero is refused."""
        with pytest.raises(InvalidError):
            CatalogLimits(supersteps_max=0)


class TestTopology:
    def test_a_definition_is_read_back(self, catalog: Catalog) -> None:
        """Computations, streams and subscriptions come back as they were declared."""
        catalog.record_pipeline(DEFINITION)

        counter, spikes = catalog.computations()
        assert (counter.name, counter.code_version, counter.options) == ("counter", 1, {"exactly_once": True})
        assert (spikes.codec, spikes.pipeline) == ("msgpack", "zeitgeist")
        assert catalog.streams("zeitgeist") == DEFINITION.streams
        assert catalog.subscriptions("zeitgeist") == DEFINITION.subscriptions

    def test_new_code_is_a_new_version(self, catalog: Catalog, clock: ManualClock) -> None:
        """The code version rises exactly when the code's hash changes."""
        for code_hash in ("a1", "a1", "a2", "a1"):
            clock.advance_ms(1)
            counter = replace(DEFINITION.computations[0], code_hash=code_hash)
            catalog.record_pipeline(PipelineDefinition(name="zeitgeist", computations=(counter,)))

        (entry,) = catalog.computations()
        assert (entry.code_version, entry.recorded_us) == (3, 1_004_000)

    def test_code_versions_are_bounded(self, clock: ManualClock) -> None:
        """Of ever new code the last versions stay, and the numbers go on."""
        with Catalog.open("sqlite://", clock, limits=CatalogLimits(code_versions_max=2)) as catalog:
            for number in range(5):
                counter = replace(DEFINITION.computations[0], code_hash=f"a{number}")
                catalog.record_pipeline(PipelineDefinition(name="zeitgeist", computations=(counter,)))

            assert catalog.computations()[0].code_version == 5
            assert [entry.code_hash for entry in catalog.code_versions("counter")] == ["a3", "a4"]

    def test_what_is_no_longer_declared_is_retired(self, catalog: Catalog) -> None:
        """A computation that left the pipeline is retired and comes back when declared again."""
        catalog.record_pipeline(DEFINITION)
        catalog.record_pipeline(replace(DEFINITION, computations=DEFINITION.computations[:1]))
        assert [entry.retired_us for entry in catalog.computations()] == [None, 1_000_000]

        catalog.record_pipeline(DEFINITION)
        assert [entry.retired_us for entry in catalog.computations()] == [None, None]

    def test_two_pipelines_share_no_computation(self, catalog: Catalog) -> None:
        """A name that another pipeline uses is refused, and nothing of the definition is kept."""
        catalog.record_pipeline(DEFINITION)

        with pytest.raises(InvalidError, match="another pipeline"):
            catalog.record_pipeline(replace(DEFINITION, name="other"))
        assert catalog.streams("other") == ()

    def test_options_must_be_json(self, catalog: Catalog) -> None:
        """Options that JSON cannot say are refused by name."""
        odd = ComputationDefinition(name="odd", code_hash="x", options={"at": object()})

        with pytest.raises(InvalidError, match="odd"):
            catalog.record_pipeline(PipelineDefinition(name="p", computations=(odd,)))


class TestCommits:
    def test_an_owner_is_followed(self, catalog: Catalog) -> None:
        """An interval shows its owner's last commit, and its owners their versions."""
        log = CommitHistory()
        log.commit({ALL.app_id: packed_fence(4, 0)})
        log.superstep(1, {ALL: (4, 1)})
        log.commit({ALL.app_id: packed_fence(7, 0)})
        for facts in log.commits:
            catalog.record_commits([facts])

        (entry,) = catalog.intervals()
        assert entry.fence == Fence(Sequencer(7), CommitNumber(0))
        assert (entry.opened_version, entry.closed_version, entry.version) == (2, None, 2)
        assert entry.input_watermark_us == 1_000
        owners = [
            (entry.sequencer, entry.opened_version, entry.closed_version) for entry in catalog.leases(ALL)
        ]
        assert owners == [(4, 0, 2), (7, 2, None)]

    def test_a_split_closes_what_it_replaced(self, catalog: Catalog) -> None:
        """Intervals with shared keys and higher sequencers close the older ones, and a merge reopens."""
        catalog.record_commits(busy_history().commits)
        assert [entry.interval for entry in catalog.intervals("counter")] == [LEFT, RIGHT]
        assert [entry.closed_version for entry in catalog.intervals(closed=True)] == [None, 4, None]

        log = busy_history()
        catalog.record_commits([log.commit({ALL.app_id: packed_fence(9, 0)})])
        assert [entry.interval for entry in catalog.intervals("counter")] == [ALL]

    def test_a_late_commit_sets_nothing_back(self, catalog: Catalog) -> None:
        """A commit that is recorded after its successor changes no present state."""
        log = busy_history()
        catalog.record_commits(log.commits)
        before = everything(catalog)
        catalog.record_commits([log.commits[3]])
        catalog.record_commits([log.commits[5]])

        assert everything(catalog) == before

    def test_supersteps_are_journaled(self, catalog: Catalog) -> None:
        """The journals say of each superstep what its commit said."""
        catalog.record_commits([replace(busy_history().commits[-1], commit_ms=2.5)])

        (entry,) = catalog.supersteps("zeitgeist")
        assert (entry.superstep, entry.version, entry.records, entry.late) == (4, 7, 40, 1)
        assert (entry.duplicates, entry.commit_ms, entry.wall_us) == (0, 2.5, 5_007_000)
        marks = catalog.watermarks("zeitgeist", Superstep(4))
        assert {(mark.interval, mark.input_us) for mark in marks} == {(LEFT, 4_000), (RIGHT, 4_000)}
        assert catalog.supersteps("other") == ()

    def test_watermarks_of_computations_and_injectors(self, catalog: Catalog) -> None:
        """PercentileTimes that ride as positions are journaled: a computation's as input, an injector's as output."""
        computation, injector = "millpond/watermark/p/computation/c", "millpond/watermark/p/injector/i"
        txns = {AppId.SUPERSTEP.of("p"): 1, computation: 5, injector: 9}
        catalog.record_commits([CommitHistory().commit(txns)])

        marks = {mark.subject: (mark.input_us, mark.output_us) for mark in catalog.watermarks("p")}
        assert marks == {computation: (5, None), injector: (None, 9)}
        assert all(mark.interval is None for mark in catalog.watermarks("p"))

    def test_counts_may_be_in_a_block(self, catalog: Catalog) -> None:
        """Counters are found under ``counts`` as well."""
        facts = CommitHistory().commit({AppId.SUPERSTEP.of("p"): 1}, counts={"records": 3, "dead_letters": 2})
        catalog.record_commits([facts])

        (entry,) = catalog.supersteps()
        assert (entry.records, entry.dead_letters) == (3, 2)

    def test_malformed_inputs_are_data_errors(self, catalog: Catalog) -> None:
        """An input app id or a definition that cannot be read is refused."""
        with pytest.raises(DataError, match="malformed input"):
            catalog.record_commits([CommitHistory().commit({"millpond/input/only": 1})])
        with pytest.raises(DataError, match="definition"):
            catalog.record_commits([CommitHistory().commit({}, definition={"name": "p"})])

    def test_the_journals_are_bounded(self, clock: ManualClock) -> None:
        """Only the last supersteps, owners and code versions stay, whatever the number of commits."""
        limits = CatalogLimits(supersteps_max=16, leases_per_interval_max=3, code_versions_max=2)
        log = CommitHistory()
        with Catalog.open("sqlite://", clock, limits=limits) as catalog:
            for number in range(1, 101):
                catalog.record_commits([log.superstep(number, {ALL: (number, 0)})])

            assert len(catalog.supersteps()) <= 18
            assert len(catalog.watermarks("zeitgeist")) <= 18
            assert [entry.sequencer for entry in catalog.leases(ALL)] == [98, 99, 100]

    def test_wide_supersteps_are_bounded_by_rows(self, clock: ManualClock) -> None:
        """The watermark journal is cut by rows when supersteps touch many intervals."""
        intervals = [Interval("wide", f"{n:03}", f"{n + 1:03}") for n in range(50)]
        log = CommitHistory()
        with Catalog.open("sqlite://", clock, limits=CatalogLimits(watermark_rows_max=120)) as catalog:
            for number in range(1, 11):
                fences = dict.fromkeys(intervals, (1, number))
                catalog.record_commits([log.superstep(number, fences)])

            kept = {mark.superstep for mark in catalog.watermarks("zeitgeist")}
            assert kept == {8, 9, 10}
            assert len(catalog.intervals()) == 50


def test_many_processes_open_at_once(tmp_path: Path) -> None:
    """However many open a new catalog at the same moment, it is made once and all can use it."""
    url = default_catalog_url(str(tmp_path))
    start = threading.Barrier(6)
    failures: list[BaseException] = []

    def open_and_record(number: int) -> None:
        start.wait()
        try:
            with Catalog.open(url, store_id="pond") as opened:
                opened.publish_horizon(f"reader {number}", TableVersion(number))
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=open_and_record, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    with Catalog.open(url) as opened:
        assert len(opened.horizons()) == 6


def test_extreme_times_fit() -> None:
    """The ends of time are stored as they are."""
    log = CommitHistory()
    facts = log.superstep(1, {ALL: (1, 1)})
    ends = replace(
        facts, metadata={"watermarks": {ALL.app_id: -(2**63)}, "output_watermarks": {"s": 2**63 - 1}}
    )
    with Catalog.open("sqlite://") as catalog:
        catalog.record_commits([ends])
        (entry,) = catalog.intervals()

        assert entry.input_watermark_us == EventTimeMicros(-(2**63))
        assert catalog.watermarks("zeitgeist")[-1].output_us == 2**63 - 1
