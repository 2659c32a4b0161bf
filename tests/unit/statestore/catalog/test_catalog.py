"""The catalog: definitions, bounded code versions, and recovery from the log."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from millpond.statestore.catalog.catalog import CODE_VERSIONS_MAX, Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.catalog.topology import (
    DEFINES,
    ComputationDefinition,
    PipelineDefinition,
)
from millpond.statestore.errors import DataError, InvalidError, UnavailableError
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.log import Log
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion
from millpond.testing.fixtures.determinism import ManualClock

DEFINITION = PipelineDefinition(
    name="zeitgeist",
    computations=(
        ComputationDefinition(name="counter", code_hash="a1", options={"exactly_once": True}),
        ComputationDefinition(name="spikes", code_hash="b1", codec="msgpack"),
    ),
)
START_US = 1_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START_US)


@pytest.fixture
def catalog(clock: ManualClock) -> Iterator[Catalog]:
    with Catalog.open("sqlite://", clock) as opened:
        yield opened


class TestOpening:
    def test_default_catalog_is_in_store_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "a pond % @ ü"
        folder.mkdir()
        with Catalog.open(default_catalog_url(str(folder))) as first:
            first.record_pipeline(DEFINITION)

        with Catalog.open(default_catalog_url(str(folder))) as second:
            assert [entry.name for entry in second.computations()] == ["counter", "spikes"]
        assert (folder / "catalog.sqlite").exists()

    def test_unreachable_database_is_unavailable(self, tmp_path: Path) -> None:
        with pytest.raises(UnavailableError, match="does not answer"):
            Catalog.open(f"sqlite:///{tmp_path}/nowhere/catalog.sqlite")

    @pytest.mark.parametrize("url", ["no url", "nosuchdatabase://host/x"])
    def test_unusable_url_is_invalid(self, url: str) -> None:
        with pytest.raises(InvalidError):
            Catalog.open(url)

    def test_non_catalog_file_is_data_error(self, tmp_path: Path) -> None:
        (tmp_path / "catalog.sqlite").write_bytes(b"not a database" * 500)

        with pytest.raises(DataError, match="rebuilt from the log"):
            Catalog.open(default_catalog_url(str(tmp_path)))

    def test_catalog_of_another_store_is_refused(self, tmp_path: Path) -> None:
        url = default_catalog_url(str(tmp_path))
        Catalog.open(url).close()
        Catalog.open(url, store_id="pond-1").close()
        Catalog.open(url, store_id="pond-1").close()

        with pytest.raises(InvalidError, match="another store"):
            Catalog.open(url, store_id="pond-2")

    def test_read_only_open_creates_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UnavailableError):
            Catalog.open(default_catalog_url(str(tmp_path)), read_only=True)
        assert list(tmp_path.iterdir()) == []

    def test_read_only_catalog_reads_and_refuses_writes(self, tmp_path: Path) -> None:
        """Another process records meanwhile."""
        url = default_catalog_url(str(tmp_path))
        with Catalog.open(url) as writer, Catalog.open(url, read_only=True) as reader:
            writer.record_pipeline(DEFINITION)

            assert [entry.name for entry in reader.computations()] == ["counter", "spikes"]
            assert writer.computations() == reader.computations()
            with pytest.raises(UnavailableError):
                reader.record_pipeline(DEFINITION)

    def test_catalog_knows_its_creation_time(self, catalog: Catalog, clock: ManualClock) -> None:
        clock.advance_ms(10)

        assert catalog.created_us == 1_000_000


class TestTopology:
    def test_definition_is_read_back(self, catalog: Catalog) -> None:
        catalog.record_pipeline(DEFINITION)

        counter, spikes = catalog.computations()
        assert (counter.name, counter.code_version, counter.options) == ("counter", 1, {"exactly_once": True})
        assert (spikes.codec, spikes.pipeline) == ("msgpack", "zeitgeist")

    def test_changed_code_hash_raises_code_version(self, catalog: Catalog, clock: ManualClock) -> None:
        for code_hash in ("a1", "a1", "a2", "a1"):
            clock.advance_ms(1)
            counter = replace(DEFINITION.computations[0], code_hash=code_hash)
            catalog.record_pipeline(PipelineDefinition(name="zeitgeist", computations=(counter,)))

        (entry,) = catalog.computations()
        assert (entry.code_version, entry.recorded_us) == (3, 1_004_000)

    def test_code_versions_are_bounded(self, catalog: Catalog) -> None:
        """The numbers keep rising after older versions are dropped."""
        for number in range(CODE_VERSIONS_MAX + 3):
            counter = replace(DEFINITION.computations[0], code_hash=f"a{number}")
            catalog.record_pipeline(PipelineDefinition(name="zeitgeist", computations=(counter,)))

        assert catalog.computations()[0].code_version == CODE_VERSIONS_MAX + 3
        kept = [f"a{number}" for number in range(3, CODE_VERSIONS_MAX + 3)]
        assert [entry.code_hash for entry in catalog.code_versions("counter")] == kept

    def test_undeclared_computation_is_retired(self, catalog: Catalog) -> None:
        """It is active again once it is declared again."""
        catalog.record_pipeline(DEFINITION)
        catalog.record_pipeline(replace(DEFINITION, computations=DEFINITION.computations[:1]))
        assert [entry.retired_us for entry in catalog.computations()] == [None, 1_000_000]

        catalog.record_pipeline(DEFINITION)
        assert [entry.retired_us for entry in catalog.computations()] == [None, None]

    def test_pipelines_cannot_share_computation(self, catalog: Catalog) -> None:
        """The whole definition is refused."""
        catalog.record_pipeline(DEFINITION)

        with pytest.raises(InvalidError, match="another pipeline"):
            catalog.record_pipeline(replace(DEFINITION, name="other"))
        assert {entry.pipeline for entry in catalog.computations()} == {"zeitgeist"}

    def test_options_must_be_json(self, catalog: Catalog) -> None:
        odd = ComputationDefinition(name="odd", code_hash="x", options={"at": object()})

        with pytest.raises(InvalidError, match="odd"):
            catalog.record_pipeline(PipelineDefinition(name="p", computations=(odd,)))


def test_many_processes_create_catalog_once(tmp_path: Path) -> None:
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


class TestRebuilding:
    @pytest.fixture
    def log(self) -> Log:
        log = Log(MemoryObjects())
        changed = replace(DEFINITION.computations[0], code_hash="a2")
        later = replace(DEFINITION, computations=(changed,))
        for version, definition in enumerate((None, DEFINITION, None, DEFINITION, later, None)):
            fields: dict[str, Any] = {"kind": "fence"}
            if definition is not None:
                fields["definition"] = asdict(definition)
            info = CommitInfo(operation="X", timestamp_ms=5_000 + version, millpond=fields)
            log.put(TableVersion(version), encode([info]))
        return log

    def rebuild(self, catalog: Catalog, log: Log) -> None:
        catalog.rebuild(newest_commits(log, TableVersion(5), naming=DEFINES))

    def test_lost_catalog_is_rebuilt_from_log(self, catalog: Catalog, log: Log) -> None:
        self.rebuild(catalog, log)

        counter, spikes = catalog.computations()
        assert (counter.code_version, counter.recorded_us, counter.retired_us) == (2, 5_004_000, None)
        assert (spikes.code_version, spikes.recorded_us, spikes.retired_us) == (1, 5_001_000, 5_004_000)
        hashes = [entry.code_hash for entry in catalog.code_versions("counter")]
        assert hashes == ["a1", "a2"]

    def test_rebuild_is_idempotent(self, catalog: Catalog, log: Log) -> None:
        self.rebuild(catalog, log)
        before = catalog.computations(), catalog.code_versions("counter")
        self.rebuild(catalog, log)

        assert (catalog.computations(), catalog.code_versions("counter")) == before

    def test_newer_definition_survives_rebuild(self, catalog: Catalog, clock: ManualClock, log: Log) -> None:
        """Commits hold older definitions than the catalog."""
        clock.advance_ms(8_000)
        newer = replace(DEFINITION.computations[0], code_hash="a3")
        catalog.record_pipeline(replace(DEFINITION, computations=(newer,)))
        self.rebuild(catalog, log)

        assert [entry.code_hash for entry in catalog.computations()] == ["a3"]

    def test_malformed_definition_is_data_error(self, catalog: Catalog, log: Log) -> None:
        info = CommitInfo(operation="X", timestamp_ms=1, millpond={"definition": {"name": "p"}})
        log.put(TableVersion(6), encode([info]))

        with pytest.raises(DataError, match="definition"):
            catalog.rebuild(newest_commits(log, TableVersion(6)))
