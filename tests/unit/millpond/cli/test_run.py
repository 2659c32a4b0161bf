"""``millpond run`` on files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main

CODE = """
import os

import millpond as mp

class Count(mp.Computation):
    def process_record(self, context, record):
        if record.value["n"] == 25 and os.path.exists("stop"):
            raise KeyboardInterrupt
        context.state.set(context.state.get(0) + record.value["n"])

def pipeline():
    print("made")
    made = mp.Pipeline("counts")
    numbers = made.inject("numbers", key="key", at="at", watermark=mp.BoundedDisorder("1s"))
    numbers.apply(Count(), name="count")
    return made

class Strict(mp.Computation):
    def process_record(self, context, record):
        context.state.set(int(record.value["n"]) if os.path.exists("mended") else 0 + record.value["n"])

def strict():
    made = mp.Pipeline("strict")
    numbers = made.inject("numbers", key="key", at="at", watermark=mp.BoundedDisorder("1s"))
    numbers.apply(Strict(), name="count", on_late="drop")
    return made

def inputs():
    return {"numbers": [{"key": "a", "at": 1, "n": 1}]}

def wrong_inputs():
    return [1]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "counts_of_test.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "numbers").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("counts_of_test", None)


def write(name: str, numbers: range) -> None:
    lines = [json.dumps({"key": "ab"[n % 2], "at": n * 1_000_000, "n": n}) for n in numbers]
    Path("numbers", name).write_text("\n".join(lines), encoding="utf-8")


def run(hosts: str, *arguments: str, pipeline: str = "counts_of_test:pipeline") -> Result:
    given = ("--store", "pond", "--zookeeper", hosts, "--quiet", *arguments)
    return CliRunner().invoke(main, ["run", pipeline, *given])


def summary_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def sums() -> dict[str, Any]:
    with mp.Store.open("pond", read_only=True) as store:
        return {
            row["key"]: json.loads(row["state"])
            for row in store.rows_view("count").to_arrow(("a", "b")).to_pylist()
        }


FILES = ("--input", "numbers=numbers")


def test_growing_folder_is_continued(zookeeper_hosts: str) -> None:
    write("9.json", range(10))
    first = summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    write("10.json", range(10, 30))
    second = summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    third = summary_of(run(zookeeper_hosts, *FILES, "--json"))

    assert [one["run"]["injected"] for one in (first, second, third)] == [10, 20, 0]
    assert (second["skipped"], third["ended"]) == (
        {"numbers": "10 of 30 rows were consumed before"},
        ["numbers"],
    )
    assert (third["pipeline"], third["store"], third["watermark"]) == ("counts", "pond", "end of time")
    assert third["totals"]["records"] == 30
    assert sums() == {"a": sum(range(0, 30, 2)), "b": sum(range(1, 30, 2))}
    write("11.json", range(30, 31))
    refused = run(zookeeper_hosts, *FILES)
    assert (refused.exit_code, "the input has ended" in refused.stderr) == (1, True)


def test_status_and_history_name_file_and_row(zookeeper_hosts: str) -> None:
    write("1.json", range(10))
    summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    write("2.json", range(10, 13))
    summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    shown = CliRunner().invoke(main, ["status", "pond"]).stdout
    (status,) = [
        json.loads(line)
        for line in CliRunner().invoke(main, ["status", "pond", "--json"]).stdout.splitlines()
    ]
    history = [
        json.loads(line)
        for line in CliRunner().invoke(main, ["history", "pond", "--json"]).stdout.splitlines()
    ]
    moved = [commit["inputs"][0] for commit in history if commit["inputs"]]

    assert "numbers local 13 rows row 3 of 2.json" in " ".join(shown.split())
    assert [(one["batch"], json.loads(one["offsets"])["file"]) for one in moved] == [
        (13, "2.json"),
        (10, "1.json"),
    ]
    (consumed,) = status["pipelines"][0]["inputs"]
    assert {"pipeline": "counts", **consumed} == moved[0]
    assert "numbers: 13 rows" in CliRunner().invoke(main, ["history", "pond"]).stdout


def test_inserted_files_are_refused(zookeeper_hosts: str) -> None:
    """They would shift all consumed positions."""
    write("2.json", range(10))
    summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    write("1.json", range(3))
    refused = run(zookeeper_hosts, *FILES, "--more-to-come")

    assert refused.exit_code == 1
    assert "new files so that they come last" in refused.stderr
    assert sum(sums().values()) == sum(range(10))


def test_files_wait_until_they_have_settled(zookeeper_hosts: str) -> None:
    """A file that comes late waits with all behind it, also if one was consumed and grows."""
    options = (*FILES, "--more-to-come", "--settle", "1h", "--json")

    def injected() -> tuple[int, bool]:
        result = run(zookeeper_hosts, *options)
        return summary_of(result)["run"]["injected"], "wait for a later run" in result.stderr

    def settle(name: str) -> None:
        os.utime(Path("numbers", name), (1e9, 1e9))

    write("2.json", range(10))
    assert injected() == (0, True)
    settle("2.json")
    write("4.json", range(13, 20))
    settle("4.json")
    write("3.json", range(10, 13))
    assert injected() == (10, True)
    settle("3.json")
    assert injected() == (10, False)
    write("4.json", range(13, 25))
    assert injected() == (0, True)
    settle("4.json")
    assert injected() == (5, False)
    assert sum(sums().values()) == sum(range(25))
    for other in ("--spark", "--quiet"):
        refused = run(zookeeper_hosts, *FILES, "--settle", "1h", other)
        assert (refused.exit_code, "--settle" in refused.stderr) == (2, True)


def test_form_of_text_files_can_be_said(zookeeper_hosts: str) -> None:
    Path("numbers.csv").write_bytes("key;n;at\nø;7;1\n".encode("latin-1"))
    options = ("--input", "numbers=numbers.csv", "--delimiter", ";", "--encoding", "latin-1", "--json")

    assert summary_of(run(zookeeper_hosts, *options))["run"]["injected"] == 1
    refused = run(zookeeper_hosts, *options, "--delimiter", ";;")
    assert (refused.exit_code, "one character" in refused.stderr) == (2, True)


def test_interrupted_run_is_continued(
    here: Path, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.executor.local.bounded.BUNDLE_RECORDS_MAX", 10)
    write("1.json", range(40))
    (here / "stop").touch()
    stopped = run(zookeeper_hosts, *FILES)
    assert stopped.exit_code == 1
    assert sum(sums().values()) == sum(range(20))

    (here / "stop").unlink()
    assert summary_of(run(zookeeper_hosts, *FILES, "--json"))["run"]["injected"] == 20
    assert sum(sums().values()) == sum(range(40))


def test_rewound_store_reads_files_again(zookeeper_hosts: str) -> None:
    write("1.json", range(10))
    summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    with mp.Store.open("pond", read_only=True) as store:
        version = store.snapshot().version
    write("2.json", range(10, 30))
    summary_of(run(zookeeper_hosts, *FILES, "--more-to-come", "--json"))
    given = ["rewind", "pond", "--version", str(version), "--yes", "--zookeeper", zookeeper_hosts]
    rewound = CliRunner().invoke(main, given)
    assert rewound.exit_code == 0
    assert "reads numbers from there" in rewound.stderr
    assert "inject" not in rewound.stderr
    assert sum(sums().values()) == sum(range(10))

    assert summary_of(run(zookeeper_hosts, *FILES, "--json"))["run"]["injected"] == 20
    assert sum(sums().values()) == sum(range(30))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"key": null, "at": "2026-01-01T00:01:00Z", "n": 1}', "1 became dead letters"),
        ('{"key": "b", "at": "2025-01-01T00:00:00Z", "n": 1}', "1 came too late"),
        ('{"key": "b", "at": "1970-01-01T00:00:07Z", "n": 1}', "1 of numbers have times in 1970"),
    ],
)
def test_strict_run_tells_records_that_were_not_processed_as_meant(
    zookeeper_hosts: str, line: str, problem: str
) -> None:
    """The late record comes in a run of its own, because the rows of one run arrive together."""
    good = ['{"key": "a", "at": "2026-01-01T00:00:00Z", "n": 1}' for _ in range(3)]
    late = [line] if "2025" in line else []
    Path("numbers", "1.json").write_text("\n".join([*good, *([] if late else [line])]), encoding="utf-8")
    first = run(zookeeper_hosts, *FILES, "--more-to-come", "--strict", pipeline="counts_of_test:strict")
    Path("numbers", "2.json").write_text("\n".join([*late, *good]), encoding="utf-8")
    second = run(
        zookeeper_hosts, *FILES, "--more-to-come", "--strict", "--json", pipeline="counts_of_test:strict"
    )

    told, quiet = (second, first) if late else (first, second)
    assert (told.exit_code, quiet.exit_code) == (3, 0), told.output + quiet.output
    assert problem in told.stderr
    assert "of the records of this run" not in quiet.stderr
    assert [problem in one for one in json.loads(second.stdout)["problems"]] == [True] * len(late)


def test_retried_letters_are_counted_beside_the_dead_letters(zookeeper_hosts: str) -> None:
    """They were dead letters once, but none is left, and the last run did something."""
    broken = [f'{{"key": "a", "at": "2026-01-01T00:00:0{n}Z", "n": "{n}"}}' for n in range(3)]
    good = ['{"key": "a", "at": "2026-01-01T00:00:00Z", "n": 1}' for _ in range(9)]
    Path("numbers", "1.json").write_text("\n".join([*good, *broken]), encoding="utf-8")
    given = (*FILES, "--more-to-come")
    assert run(zookeeper_hosts, *given, pipeline="counts_of_test:strict").exit_code == 0
    asked = ["dead-letters", "retry", "pond", "--all", "--zookeeper", zookeeper_hosts]
    assert CliRunner().invoke(main, asked).exit_code == 0
    Path("mended").touch()
    retried = run(zookeeper_hosts, *given, pipeline="counts_of_test:strict")
    again = run(zookeeper_hosts, *given, pipeline="counts_of_test:strict")

    rows = [line.split() for line in retried.stdout.splitlines()]
    assert (["dead", "letters", "0", "3"] in rows, ["retried", "3", "3"] in rows) == (True, True)
    assert "nothing was processed" not in retried.stderr
    assert again.exit_code == 0
    assert "letters" not in again.stderr


def test_dropped_letters_are_not_left(zookeeper_hosts: str, caplog: pytest.LogCaptureFixture) -> None:
    Path("numbers", "1.json").write_text(
        "\n".join(
            f'{{"key": "a", "at": "2026-01-01T00:00:0{n}Z", "n": {json.dumps(n or "0")}}}' for n in range(9)
        ),
        encoding="utf-8",
    )
    given = (*FILES, "--more-to-come")
    told = "1 dead letters of earlier runs were not retried"
    for _ in range(2):
        run(zookeeper_hosts, *given, pipeline="counts_of_test:strict")
    assert told in caplog.text
    caplog.clear()
    asked = ["dead-letters", "drop", "pond", "--all", "--zookeeper", zookeeper_hosts]
    assert CliRunner().invoke(main, asked).exit_code == 0
    for _ in range(2):
        run(zookeeper_hosts, *given, pipeline="counts_of_test:strict")
    assert told not in caplog.text


def test_function_may_return_inputs(zookeeper_hosts: str) -> None:
    result = run(zookeeper_hosts, "--inputs", "counts_of_test:inputs")

    assert result.exit_code == 0, result.output
    assert "counts: superstep" in result.stdout
    assert "watermark end of time" in result.stdout
    assert ["injected", "1", "1"] in [line.split() for line in result.stdout.splitlines()]
    assert sums() == {"a": 1}


def test_only_summary_is_on_stdout(zookeeper_hosts: str) -> None:
    """With --json, output of the user's code goes to standard error."""
    result = run(zookeeper_hosts, "--inputs", "counts_of_test:inputs", "--json")

    assert summary_of(result)["supersteps"] > 0
    assert "made" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "what is the input"),
        (("--input", "numbers"), "written STREAM=PATH"),
        (("--input", "number=numbers"), "did you mean 'numbers'"),
        (("--input", "numbers=nowhere"), "no file and no folder"),
        (("--input", "numbers=s3://bucket/numbers"), "give --spark"),
        ((*FILES, *FILES), "given twice"),
        (("--inputs", "counts_of_test:wrong_inputs"), "returns a dict"),
        (("--inputs", "counts_of_test:Counts"), "did you mean 'Count'"),
        (("--intervals", "0", *FILES), "--intervals"),
    ],
)
def test_wrong_usage_creates_no_store(arguments: tuple[str, ...], reason: str) -> None:
    write("1.json", range(1))
    result = run("", *arguments)

    assert result.exit_code == 2, result.output
    assert reason in result.stderr
    assert not Path("pond").exists()


def test_missing_pipeline_is_wrong_usage() -> None:
    result = run("", *FILES, pipeline="counts_of_test:pipelines")

    assert (result.exit_code, "did you mean 'pipeline'" in result.stderr) == (2, True)
