"""Compatibility of released store formats, and refusal of newer ones.

Each folder ``v…`` was written by that version with `tests.format.write`, and is never rewritten. Its
contents are beside it as plain JSON. A store of today's version is tested too, so that the script works when
it is needed.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.evolution import Evolution, check_codecs, plan_evolution
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import FORMAT_VERSION_KEY, STORE_ID_KEY, create_table
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.format import write
from tests.format.harbour import Harbour, Tally, Visits
from tests.format.old_store import CODECS, HERE, RELEASED, Old, flat, micros, rows_of

NOW: Final = UpkeepPolicy(retention=0, collect_every=1)


@pytest.fixture(scope="module", params=[*RELEASED, "today"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each released version's store, and a store of this version."""
    if request.param != "today":
        return HERE / str(request.param)
    folder = tmp_path_factory.mktemp("format") / "today"
    write.write(folder)
    return folder


@pytest.fixture
def old(written: Path, tmp_path: Path) -> Old:
    """A copy of it, with its sinks."""
    return Old.copied(written, tmp_path / "old")


def test_old_store_records_its_location(tmp_path: Path) -> None:
    """A store without incarnations opens without a question, and is identified by its place afterwards."""
    old = Old.copied(HERE / "v0.1", tmp_path / "old")
    assert old.open().lineage.location == ""
    old.go_on()
    assert old.open().lineage.location == str(old.path)
    copy = shutil.copytree(old.path, tmp_path / "copy")
    with pytest.raises(InvalidError, match="location has changed"):
        Store.open(copy, leases=old.harbour.leases, clock=old.harbour.clock, rng=old.harbour.rng)


def test_released_versions_have_stores() -> None:
    """A release must not lose the files with its expected contents."""
    assert "v0.1" in RELEASED
    assert all((HERE / name / write.CONTENTS).exists() for name in RELEASED)


def test_store_is_small_and_names_no_machine() -> None:
    """A checked-in store has at most a quarter of a megabyte, and no paths of its author's machine."""
    for name in RELEASED:
        files = [path.read_bytes() for path in (HERE / name).rglob("*") if path.is_file()]
        assert sum(map(len, files)) < 250_000
        assert not [data for data in files if str(HERE.parent.parent).encode() in data or b"/home/" in data]


class TestReading:
    def test_states(self, old: Old) -> None:
        """A deleted key has no state; every codec is covered."""
        assert old.states() == old.contents["newest"]

    def test_older_version_is_readable(self, old: Old) -> None:
        """The version is the one at which a day's first windows closed."""
        states = old.states(old.contents["older_version"])

        assert {name: states[name] for name in old.contents["older"]} == old.contents["older"]

    def test_timers(self, old: Old) -> None:
        """Timers of both clocks, and holds, are pending."""
        with old.open() as store:
            stored = {name: timers(store, name) for name in old.contents["timers"]}

        assert stored == old.contents["timers"]

    def test_dead_letters(self, old: Old) -> None:
        """A refused record and a row without a key name their computations."""
        with old.open() as store:
            rows = store.rows_view(DEAD_LETTERS).to_arrow().to_pylist()
        letters = [orjson.loads(row["state"]) for row in rows]
        fields = [[each["computation"], each["key"], id_of(each), each["error"]] for each in letters]

        assert sorted(fields, key=str) == sorted(old.contents["dead_letters"], key=str)

    def test_undelivered_productions(self, old: Old) -> None:
        """The last superstep's productions wait in the rows for the next one."""
        with old.open() as store:
            snapshot = store.snapshot()
            files = [file.path for file in snapshot.files]
            updates = read_row_files(store.objects, files, list(ROW_SCHEMA.names)).to_pylist()
        newest = max(row["superstep"] for row in updates)
        pending = [each for row in updates if row["superstep"] == newest for each in row["productions"] or ()]

        assert [
            [each["stream"], each["key"], orjson.loads(each["value"]), micros(each["at"])] for each in pending
        ] == old.contents["undelivered"]

    def test_positions(self, old: Old) -> None:
        """Supersteps, the low watermark and a percentile watermark are unchanged."""
        with old.open() as store:
            txns = store.snapshot().txns

        assert {name: txns[name] for name in old.contents["positions"]} == old.contents["positions"]

    def test_sql(self, old: Old) -> None:
        """The command line gives the same rows."""
        query = "select key, (state ->> 'tons')::int as tons from visits order by key"
        with old.open() as store:
            answer = store.sql().execute(query).fetchall()
        told = CliRunner().invoke(main, ["sql", str(old.path), query, "--json"])

        expected = {key: state["tons"] for key, state in old.contents["newest"]["visits"].items()}
        assert dict(answer) == expected
        assert {row["key"]: row["tons"] for row in map(orjson.loads, told.stdout.splitlines())} == expected

    def test_store_is_sound(self, old: Old) -> None:
        """Its log begins with a checkpoint; seals, checksums and chained digests match."""
        objects = open_objects(f"{old.path}/rows")
        report = verify_store(objects)

        assert report.findings == ()
        assert report.checkpoints > 0
        assert Log(objects).inventory().versions[0] > 0

    def test_catalog_opens(self, old: Old, written: Path) -> None:
        """The catalog has the code and the journal of its time."""
        with old.open() as store:
            assert store.catalog is not None
            computations = store.catalog.computations()
            assert {entry.name for entry in computations if entry.retired_us is None} >= {*CODECS}
            for entry in computations:
                newest_code = store.catalog.code_versions(entry.name)[-1]
                assert (entry.code_version, entry.code_hash) == (
                    newest_code.code_version,
                    newest_code.code_hash,
                )

        with closing(sqlite3.connect(old.path / "catalog.sqlite")) as database:
            query = "select superstep, version from supersteps order by version desc limit 1"
            newest = database.execute(query).fetchall()
        # Earlier versions wrote the journal, which is kept unchanged.
        assert newest == ([(11, old.contents["newest_version"])] if written.name in RELEASED else [])

    def test_sinks(self, old: Old) -> None:
        """Delta reads both an appended table and an upserted table."""
        assert old.sinks() == flat(old.contents["sinks"])


class TestGoingOn:
    def test_pipeline_continues(self, old: Old) -> None:
        """Productions are delivered once, duplicates dropped, timers fired, and windows closed."""
        old.go_on()

        assert old.states() == old.contents["continued"]["newest"]

    def test_sinks_continue(self, old: Old) -> None:
        """Each has everything once, and the last pane of each window."""
        old.go_on()

        found, expected = old.sinks(), flat(old.contents["continued"]["sinks"])
        assert {name: found[name] for name in expected} == expected

    def test_delta_reads_old_and_new_rows(self, old: Old) -> None:
        """Rows have the columns that the table was created with."""
        old.go_on()

        rows = rows_of(old.path / "rows")
        ids = {entry["id"] for row in rows for entry in row["record_ids"] or ()}
        assert {row["id"].encode() for row in (*write.REPEATED, *write.LATER)} <= ids

    def test_old_store_gets_versions_of_state(self, old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every Delta reader sees them."""
        monkeypatch.setattr(Tally, "state_version", 1)
        monkeypatch.setattr(Tally, "upgrade_state", lambda _, state, __: state)
        old.go_on()

        expected = {
            row["key"]: row["state_version"]
            for row in old.open().rows_view("tally").to_arrow().to_pylist()
            if row["state"] is not None
        }
        assert set(expected.values()) == {1}
        versions = {row["state_version"] for row in rows_of(old.path / "rows")}
        assert versions == {None, 1}

    def test_incompatible_code_is_refused(self, old: Old) -> None:
        """The log and the rows reveal another codec and a missing computation."""
        topology = old.harbour.pipeline().check()
        seals = topology.computations["seals"]
        in_text = {**topology.computations, "seals": replace(seals, computation=Visits())}
        without = {name: node for name, node in topology.computations.items() if name != "seals"}
        with old.open() as store:
            snapshot = store.snapshot()
            plan_evolution(topology, snapshot)
            check_codecs(topology, snapshot, Evolution(), store.objects)
            with pytest.raises(InvalidError, match=r"another codec.*`seals`"):
                check_codecs(replace(topology, computations=in_text), snapshot, Evolution(), store.objects)
            with pytest.raises(InvalidError, match=r"no longer has.*`seals`"):
                plan_evolution(replace(topology, computations=without), snapshot)

    def test_garbage_is_collected(self, old: Old) -> None:
        """Today's compactions and collections keep the rows, and the store sound."""
        with old.harbour.open() as store:
            done = collect_offline(store, old.harbour.clock, old.harbour.rng, NOW)

        assert done.collections[0].paths
        assert old.states() == old.contents["newest"]
        assert verify_store(open_objects(f"{old.path}/rows")).findings == ()


class TestNewer:
    @pytest.mark.parametrize("read_only", [True, False])
    def test_newer_format_is_refused(self, tmp_path: Path, *, read_only: bool) -> None:
        """The store is neither read nor written."""
        configuration = {FORMAT_VERSION_KEY: "2", STORE_ID_KEY: "0" * 32}
        rows = tmp_path / "rows"
        log = Log(open_objects(str(rows)))
        create_table(
            log, ManualClock(), SeededRng(), schema=ROW_SCHEMA, name="rows", configuration=configuration
        )
        before = {path.name: path.read_bytes() for path in rows.rglob("*") if path.is_file()}
        harbour = Harbour(tmp_path)

        with pytest.raises(InvalidError, match="newer Millpond"):
            Store.open(tmp_path, leases=harbour.leases, read_only=read_only, clock=harbour.clock)
        assert {path.name: path.read_bytes() for path in rows.rglob("*") if path.is_file()} == before


def timers(store: Store, computation: str) -> dict[str, Any]:
    rows = store.rows_view(computation).to_arrow().to_pylist()
    return {
        row["key"]: sorted(
            [each["tag"], each["domain"], micros(each["at"]), micros(each["output_at"])]
            for each in row["timers"]
        )
        for row in rows
    }


def id_of(letter: dict[str, Any]) -> str:
    return str(orjson.loads(letter["value"])["id"])
