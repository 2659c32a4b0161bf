"""The command line on a small store."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable

import millpond as mp
from millpond.cli.main import main
from millpond.statestore.app_ids import AppId, pipeline_number
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.catalog.topology import ComputationDefinition, PipelineDefinition
from millpond.statestore.interval import Interval
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.high_water import MemoryHighWater
from millpond.statestore.log.log import Log
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.table import create_rows_table
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import (
    TIME_MAX_US,
    CommitNumber,
    EventTimeMicros,
    Sequencer,
    Superstep,
)
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.row_updates import Update, row_updates

LOW, HIGH, ALARM = Interval("counter", "", "M"), Interval("counter", "M"), Interval("spike alarm")
END_TIMER = {"tag": "end", "domain": "event", "at": TIME_MAX_US, "output_at": TIME_MAX_US}
SOON_TIMER = {"tag": "", "domain": "wall", "at": 1_500_000, "output_at": 0}


class SmallStore:
    def __init__(self, folder: Path) -> None:
        self.objects = open_objects(f"{folder}/rows")
        self.clock, self.rng = ManualClock(), SeededRng()
        create_rows_table(Log(self.objects), self.clock, self.rng, store_id="pond-1")
        high_water = MemoryHighWater()
        self.committer = Committer(Log(self.objects), self.clock, self.rng, high_water, writer_id="w" * 32)
        self.number = 0
        self.commits: dict[Interval, int] = {}

    def commit(self, kind: str, *writes: IntervalWrite, positions: dict[str, int] | None = None) -> None:
        self.clock.advance_ms(1_000)
        metadata = {"pipeline": "zeitgeist", "counts": {"records": 10}}
        request = CommitRequest(kind=kind, writes=writes, positions=positions or {}, metadata=metadata)
        self.committer.commit(request)

    def write(self, interval: Interval, *updates: Update) -> IntervalWrite:
        number = self.commits[interval] = self.commits.get(interval, 0) + 1
        fence = Fence(Sequencer(1), CommitNumber(number))
        file = write_row_file(
            self.objects,
            interval,
            row_updates({**update, "commit_number": number, "superstep": self.number} for update in updates),
            superstep=Superstep(self.number),
            fence=fence,
            token=self.rng.token(),
        )
        mark = EventTimeMicros(1_000_000 * self.number)
        return IntervalWrite(interval=interval, fence=fence, added=(file,), watermark=mark)

    def superstep(self, *updates: tuple[Interval, list[Update]]) -> None:
        self.number += 1
        writes = [self.write(interval, *rows) for interval, rows in updates]
        positions = {
            AppId.SUPERSTEP.of("zeitgeist"): self.number,
            AppId.INPUT.of("zeitgeist", "flights", "query 1"): self.number - 1,
            "millpond/total/zeitgeist/records": 10 * self.number,
        }
        self.commit("superstep", *writes, positions=positions)


def fill(folder: Path) -> None:
    store = SmallStore(folder)
    taken = Fence(Sequencer(1), CommitNumber(0))
    store.commit("fence", *(IntervalWrite(interval=entry, fence=taken) for entry in (LOW, HIGH, ALARM)))
    store.superstep(
        (LOW, [{"key": "EWR", "state": '{"count":1}'}, {"key": "JFK", "state": '{"count":5}'}]),
        (HIGH, [{"key": "ORD", "state": '{"count":7}', "timers": [SOON_TIMER]}]),
    )
    store.superstep(
        (LOW, [{"key": "EWR", "state": '{"count":2}', "timers": [END_TIMER], "hold": TIME_MAX_US}]),
        (ALARM, [{"key": "[red]Ä", "state_bytes": b"\x00\xff"}, {"key": "plain", "state": "not json"}]),
    )
    store.commit(
        "savepoint", positions={AppId.SAVEPOINT.of("kept"): 2, AppId.SAVEPOINT.of("gone"): 2**63 - 1}
    )


ROWS = [{"k": "a", "at": "2026-01-01T00:00:00Z"}]


class Counted(mp.Computation):
    counters = ("seen",)

    def process_record(self, context, record):
        context.state.set(1)
        context.count("seen")


class Stateless(mp.Computation):
    def process_record(self, context, record):
        return


@pytest.fixture(scope="session")
def pond(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("stores") / "pond"
    fill(folder)
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def lines_of(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


class TestRows:
    def test_row_has_newest_state(self, pond: str) -> None:
        result = run("rows", pond, "counter")

        assert result.exit_code == 0
        assert "counter at version 4" in result.stdout
        assert [line.split()[:2] for line in result.stdout.splitlines() if '"count"' in line] == [
            ["EWR", '{"count":2}'],
            ["JFK", '{"count":5}'],
            ["ORD", '{"count":7}'],
        ]

    def test_older_version_of_row_is_shown(self, pond: str) -> None:
        (row,) = lines_of("rows", pond, "counter", "--key", "EWR", "--version", "2", "--json")

        assert (row["state"], row["timers"]) == ({"count": 1}, [])

    def test_only_requested_keys_are_shown(self, pond: str) -> None:
        """An absent key is no error."""
        lines = lines_of("rows", pond, "counter", "--key", "ORD", "--key", "EWR", "--key", "?", "--json")

        assert [row["key"] for row in lines] == ["EWR", "ORD"]

    def test_times_beyond_calendar_are_shown_in_words(self, pond: str) -> None:
        rows_by_key = {row["key"]: row for row in lines_of("rows", pond, "counter", "--json")}

        assert rows_by_key["EWR"]["hold"] == "end of time"
        assert rows_by_key["EWR"]["timers"][0]["at"] == "end of time"
        assert rows_by_key["ORD"]["timers"][0]["at"] == "1970-01-01T00:00:01.500000Z"
        assert "1970-01-01T00:00:01.500000Z (wall)" in run("rows", pond, "counter").stdout

    def test_any_state_is_shown(self, pond: str) -> None:
        """No text may be taken for markup."""
        alarm = lines_of("rows", pond, "spike alarm", "--json")
        assert [(row["key"], row["state"], row["state_bytes"]) for row in alarm] == [
            ("[red]Ä", None, "AP8="),
            ("plain", "not json", None),
        ]
        assert "[red]Ä" in run("rows", pond, "spike alarm").stdout

    def test_ids_and_productions_are_counted(self, tmp_path: Path) -> None:
        store = SmallStore(tmp_path)
        fence = IntervalWrite(interval=ALARM, fence=Fence(Sequencer(1), CommitNumber(0)))
        store.commit(
            "fence", fence, positions={AppId.CLAIM.of(ALARM.computation): pipeline_number("zeitgeist")}
        )
        ids = [{"id": b"flight 1", "at": 1_000_000, "arrived_at": 0}, {"id": b"\xff", "at": TIME_MAX_US}]
        made = [{"stream": "out", "key": "k", "value": '{"n":1}', "value_bytes": None, "at": 2_000_000}]
        store.superstep((ALARM, [{"key": "a", "record_ids": ids, "productions": made}]))

        table = run("rows", str(tmp_path), ALARM.computation)
        assert [line.split() for line in table.stdout.splitlines()][1] == [
            "key", "state", "timers", "hold", "superstep", "ids", "undelivered",
        ]  # fmt: skip
        assert table.stdout.splitlines()[3].split() == ["a", "1", "2", "1"]
        (row,) = lines_of("rows", str(tmp_path), ALARM.computation, "--json")
        assert row["record_ids"] == [
            {
                "id": "flight 1",
                "id_bytes": None,
                "at": "1970-01-01T00:00:01Z",
                "arrived_at": "1970-01-01T00:00:00Z",
            },
            {"id": None, "id_bytes": "/w==", "at": "end of time", "arrived_at": None},
        ]
        assert row["productions"] == [
            {
                "stream": "out",
                "key": "k",
                "value": {"n": 1},
                "value_bytes": None,
                "at": "1970-01-01T00:00:02Z",
            }
        ]

    def test_truncated_answer_is_reported_on_stderr(self, pond: str) -> None:
        result = run("rows", pond, "counter", "--limit", "1")

        assert "JFK" not in result.stdout
        assert "2 more rows" in result.stderr
        assert len(lines_of("rows", pond, "counter", "--json", "--limit", "2")) == 2
        assert len(lines_of("rows", pond, "counter", "--json", "--limit", "0")) == 3

    def test_unknown_computation_is_refused_with_known_names(self, pond: str) -> None:
        result = run("rows", pond, "countr")

        assert result.exit_code == 1
        assert "known=`counter, spike alarm`" in result.stderr


class TestSql:
    def test_sql_extracts_field_of_state(self, pond: str) -> None:
        lines = lines_of(
            "sql", pond, "select key, (state ->> 'count')::int as n from counter order by n", "--json"
        )

        assert lines == [{"key": "EWR", "n": 2}, {"key": "JFK", "n": 5}, {"key": "ORD", "n": 7}]

    def test_sql_reads_older_version(self, pond: str) -> None:
        query = "select sum((state ->> 'count')::int) as total from counter"

        assert lines_of("sql", pond, query, "--version", "2", "--json") == [{"total": 13}]
        assert lines_of("sql", pond, query, "--json") == [{"total": 14}]

    def test_sql_prints_table_and_csv(self, pond: str) -> None:
        query = 'select key, state, hold as "the ""hold""" from counter where key < \'K\' order by key'
        table = run("sql", pond, query)
        assert table.exit_code == 0
        assert "infinity" in table.stdout
        answer = list(csv.reader(StringIO(run("sql", pond, query, "--format", "csv").stdout)))
        assert answer == [
            ["key", "state", 'the "hold"'],
            ["EWR", '{"count":2}', "infinity"],
            ["JFK", '{"count":5}', ""],
        ]
        assert lines_of("sql", pond, query, "--json")[1] == {
            "key": "JFK",
            "state": '{"count":5}',
            'the "hold"': None,
        }

    def test_name_with_blanks_is_quoted(self, pond: str) -> None:
        assert lines_of("sql", pond, 'select count(*) as n from "spike alarm"', "--json") == [{"n": 2}]

    @pytest.mark.parametrize("query", ["show tables", "describe counter"])
    def test_sql_lists_tables(self, pond: str, query: str) -> None:
        result = run("sql", pond, query)

        assert result.exit_code == 0, result.output
        assert "counter" in result.stdout or "state_bytes" in result.stdout

    def test_sql_changes_only_memory(self, pond: str) -> None:
        assert run("sql", pond, "create table x (y int)").exit_code == 0
        assert run("sql", pond, "from x").exit_code == 1

    def test_sql_reads_files_only_where_allowed(self, pond: str, tmp_path: Path) -> None:
        file = tmp_path / "named.csv"
        file.write_text("key,airport\nEWR,Newark\n")
        query = f"select airport from counter join read_csv('{file}') using (key)"
        refused = run("sql", pond, query, "--json")

        assert refused.exit_code == 1
        assert "--allow-files lets a query reach files" in refused.stderr
        assert lines_of("sql", pond, query, "--json", "--allow-files") == [{"airport": "Newark"}]

    @pytest.mark.parametrize("query", ["selec", "from read_text('/etc/passwd')", "install httpfs"])
    def test_malformed_query_of_differences_is_refused(self, pond: str, query: str) -> None:
        result = run("diff", pond, pond, "--sql", query)

        assert "the query was refused" in result.stderr
        assert isinstance(result.exception, SystemExit)

    @pytest.mark.parametrize("query", ["selec", "from nowhere", "select state::int from counter"])
    def test_malformed_query_is_refused_with_reason(self, pond: str, query: str) -> None:
        result = run("sql", pond, query)

        assert result.exit_code == 1
        assert "the query was refused" in result.stderr
        assert "tables=`counter, spike alarm`" in result.stderr
        assert "Traceback" not in result.output


class TestHistory:
    def test_history_has_newest_commit_first(self, pond: str) -> None:
        entries = lines_of("history", pond, "--json")

        assert [entry["what"] for entry in entries] == [
            "savepoint",
            "superstep",
            "superstep",
            "fence",
            "create",
        ]
        last = entries[1]
        assert (last["version"], last["superstep"], last["records"]) == (3, 2, 10)
        assert (last["intervals"], last["files_added"], last["files_removed"]) == (2, 2, 0)
        assert last["at"] == "2023-11-14T22:13:23Z"
        assert last["writer"] == "w" * 32

    def test_history_table_is_limited(self, pond: str) -> None:
        result = run("history", pond, "--limit", "2")

        assert result.exit_code == 0
        assert "wwwwwwww" in result.stdout
        assert "w" * 9 not in result.stdout
        assert "fence" not in result.stdout

    def test_history_begins_where_log_begins(self, tmp_path: Path) -> None:
        fill(tmp_path / "pond")
        log = tmp_path / "pond" / "rows" / "_delta_log"
        entries = lines_of("history", str(tmp_path / "pond"), "--json")
        assert len(entries) == 5

        DeltaTable(str(tmp_path / "pond" / "rows")).create_checkpoint()
        (log / "00000000000000000000.json").unlink()
        (log / "00000000000000000001.json").unlink()
        assert [entry["version"] for entry in lines_of("history", str(tmp_path / "pond"), "--json")] == [
            4,
            3,
            2,
        ]


class TestStatus:
    def test_status_is_one_json_object(self, pond: str) -> None:
        (found,) = lines_of("status", pond, "--json")

        assert (found["store_id"], found["version"], found["files"]) == ("pond-1", 4, 4)
        assert found["committed_at"] == "2023-11-14T22:13:24Z"
        assert found["savepoints"] == [{"name": "kept", "version": 2}]
        (pipeline,) = found["pipelines"]
        assert (pipeline["pipeline"], pipeline["superstep"]) == ("zeitgeist", 2)
        assert pipeline["totals"] == {"records": 20}
        assert pipeline["inputs"] == [{"input": "flights", "source": "query 1", "batch": 1, "offsets": None}]
        counter, alarm = found["computations"]
        assert (counter["computation"], counter["intervals"], counter["files"]) == ("counter", 2, 3)
        assert (counter["row_updates"], counter["watermark"]) == (4, "1970-01-01T00:00:01Z")
        assert (alarm["intervals"], alarm["code_version"]) == (1, None)

    def test_status_has_tables(self, pond: str) -> None:
        """A missing catalog is only a note."""
        result = run("status", pond)

        assert result.exit_code == 0
        for word in ("pond-1", "zeitgeist", "query 1", "spike alarm", "kept", "low watermark", "4 files"):
            assert word in result.stdout
        assert "no code versions" in result.stderr

    def test_status_has_code_versions_of_catalog(self, tmp_path: Path) -> None:
        fill(tmp_path)
        url = default_catalog_url(str(tmp_path))
        with Catalog.open(url, store_id="pond-1") as catalog:
            declared = ComputationDefinition(name="counter", code_hash="a1")
            catalog.record_pipeline(PipelineDefinition(name="zeitgeist", computations=(declared,)))
        (found,) = lines_of("status", str(tmp_path), "--json")

        assert [entry["code_version"] for entry in found["computations"]] == [1, None]
        assert lines_of("status", str(tmp_path), "--catalog", url, "--json") == [found]

    def test_status_has_totals_and_watermarks(self, tmp_path: Path) -> None:
        """The watermark of a computation precedes the watermarks of its intervals."""
        fill(tmp_path)
        store = SmallStore.__new__(SmallStore)
        store.objects, store.clock = open_objects(f"{tmp_path}/rows"), ManualClock()
        store.committer = Committer(Log(store.objects), store.clock, SeededRng(1), MemoryHighWater())
        store.commit("superstep", positions={"millpond/watermark/zeitgeist/computation/counter": TIME_MAX_US})

        (found,) = lines_of("status", str(tmp_path), "--json")
        assert found["computations"][0]["watermark"] == "end of time"

    def test_status_has_dead_letters_and_exit_code(self, tmp_path: Path) -> None:
        fill(tmp_path)
        assert run("status", str(tmp_path), "--check").exit_code == 0
        (found,) = lines_of("status", str(tmp_path), "--json")
        assert found["dead_letters"] == []

        letters, interval = SmallStore(tmp_path / "other"), Interval("dead_letters", "p/", "p0")
        taken = Fence(Sequencer(1), CommitNumber(0))
        letters.commit("fence", IntervalWrite(interval=interval, fence=taken))
        states = [
            json.dumps({"computation": "c", "error": error, "failed_at": "now"}) for error in ("old", "new")
        ]
        for number, state in enumerate(states, 1):
            letters.number = number
            update: Update = {"key": f"p/{number}", "state": state}
            letters.commit("superstep", letters.write(interval, update))
        (found,) = lines_of("status", str(tmp_path / "other"), "--json")
        result = run("status", str(tmp_path / "other"), "--check")

        assert found["dead_letters"] == [
            {"computation": "c", "letters": 2, "newest_error": "new", "failed_at": "now"}
        ]
        assert result.exit_code == 1
        assert "newest error" in result.stdout

    def test_status_leaves_out_renamed_and_dropped_computations(self, tmp_path: Path) -> None:
        """Their fences and counts stay in the table; a retired computation has rows, and a stateless one runs."""

        def ran(**steps: str | None) -> None:
            gone = {"drop": ["two"], "retire": ["three"]} if "uno" in steps else {}
            pipeline = mp.Pipeline("p", **gone)
            numbers = pipeline.inject("numbers", key="k", at="at", watermark=mp.ManualWatermark())
            for name, former in steps.items():
                numbers.apply(Counted(), name=name, renamed_from=former)
            numbers.apply(Stateless(), name="stateless")
            mp.LocalRunner(tmp_path, progress=False).run(pipeline, {"numbers": ROWS}, finish=False)

        ran(one=None, two=None, three=None)
        ran(uno="one")
        (found,) = lines_of("status", str(tmp_path), "--json")

        counts = {one["computation"]: one["counts"] for one in found["computations"]}
        assert counts == {"dead_letters": {}, "stateless": {}, "three": {"seen": 1}, "uno": {"seen": 1}}

    def test_empty_store_has_status(self, tmp_path: Path) -> None:
        create_rows_table(Log(open_objects(f"{tmp_path}/rows")), ManualClock(), SeededRng())
        result = run("status", str(tmp_path))

        assert result.exit_code == 0
        assert "0 files, 0 bytes" in result.stdout
        assert "none has rows yet" in run("rows", str(tmp_path), "counter").stderr


class TestEverywhere:
    COMMANDS = (("status",), ("rows", "counter"), ("sql", "from counter"), ("history",))

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
    def test_help_has_purpose_and_examples(self, command: tuple[str, ...]) -> None:
        result = run(command[0], "--help")

        assert result.exit_code == 0
        assert f"Examples:\n  millpond {command[0]} pond" in result.stdout
        assert command[0] in run("--help").stdout

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
    def test_reading_changes_no_file(self, pond: str, command: tuple[str, ...]) -> None:
        """A started server would leave files too."""
        before = {path: path.stat().st_mtime_ns for path in Path(pond).rglob("*")}
        assert run(command[0], pond, *command[1:]).exit_code == 0

        assert {path: path.stat().st_mtime_ns for path in Path(pond).rglob("*")} == before

    @pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
    def test_missing_store_is_refused_and_not_created(self, tmp_path: Path, command: tuple[str, ...]) -> None:
        result = run(command[0], str(tmp_path / "none"), *command[1:])

        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("Error: ")
        assert not (tmp_path / "none").exists()

    def test_help_imports_no_command(self) -> None:
        """Large libraries would delay it."""
        code = "import sys, millpond.cli.main; print(*sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        modules = set(loaded.stdout.split())

        assert "click" in modules
        assert modules.isdisjoint({*main.homes.values(), "pyarrow", "sqlalchemy", "duckdb", "kazoo", "rich"})

    def test_storage_option_needs_value(self, pond: str) -> None:
        assert "NAME=VALUE" in run("status", pond, "--storage-option", "region").stderr

    def test_future_version_is_refused(self, pond: str) -> None:
        result = run("rows", pond, "counter", "--version", "99")

        assert result.exit_code == 1
        assert "99" in result.stderr


def test_query_as_json_has_text_for_what_json_has_no_number_for(pond: str) -> None:
    query = "select 'nan'::double a, ['-inf'::float, 1.5] b, {'x': 'inf'::double} c, 'NaN, \"Infinity' d"

    assert lines_of("sql", pond, query, "--json") == [
        {"a": "nan", "b": ["-inf", 1.5], "c": {"x": "inf"}, "d": 'NaN, "Infinity'}
    ]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("select 1 a; select 2 a", "several statements"),
        ("select 1 a, 2 a", "different names"),
        ("select 1 a, 2 A", "different names"),
    ],
)
def test_query_with_two_answers_or_names_is_refused(pond: str, query: str, reason: str) -> None:
    refused = CliRunner().invoke(main, ["sql", pond, query, "--json"])

    assert refused.exit_code == 1
    assert reason in refused.stderr
