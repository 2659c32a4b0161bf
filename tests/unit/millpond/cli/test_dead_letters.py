"""``millpond dead-letters``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main


class Average(mp.Computation):
    """Averages; fails on zero until it is fixed."""

    def __init__(self, *, mended: bool) -> None:
        self.mended = mended

    def process_record(self, context, record):
        pieces = record.value["pieces"] or (1 if self.mended else 0)
        context.state.set(record.value["price"] / pieces)


ITEMS = [("tea", 4), ("cup", 0), ("pot", 0), (None, 1)]
ROWS = [
    {"id": str(at), "item": item, "price": 12.0, "pieces": pieces, "at": at}
    for at, (item, pieces) in enumerate(ITEMS)
]


def run(folder: Path, *, mended: bool, rows: Any = ROWS) -> None:
    pipeline = mp.Pipeline("orders")
    pipeline.inject("orders", key="item", at="at", id="id").apply(Average(mended=mended), name="average")
    mp.LocalRunner(folder, progress=False).run(pipeline, {"orders": rows})


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("letters") / "pond")


def made(folder: Path) -> Path:
    run(folder, mended=False)
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["dead-letters", *map(str, arguments)])


def listed(pond: Path, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in invoke("list", pond, "--json", *arguments).stdout.splitlines()]


def test_letters_are_counted_by_error(pond: Path) -> None:
    failed, unread = listed(pond)
    assert (failed["computation"], failed["stream"], failed["letters"], failed["lost"]) == (
        "average",
        "orders",
        2,
        0,
    )
    assert failed["error"].startswith("ZeroDivisionError")
    assert (unread["error"], unread["key"]) == ("the key is null", None)
    assert [group["letters"] for group in listed(pond, "--key", "cup")] == [1]
    assert listed(pond, "--timers") == []
    table = invoke("list", pond)
    assert (table.exit_code, "ZeroDivisionError" in table.stdout) == (0, True)


def test_misspelt_name_is_refused(pond: Path) -> None:
    refused = invoke("list", pond, "--stream", "ordrs")

    assert refused.exit_code == 1
    assert "no dead letter has this stream; did you mean 'orders'?" in refused.output


def test_letter_without_a_name_is_asked_for_or_the_only_one(pond: Path, tmp_path: Path) -> None:
    asked = invoke("show", pond)
    run(tmp_path / "one", mended=True)
    run(tmp_path / "none", mended=True, rows=ROWS[:1])

    assert asked.exit_code == 2
    assert "which of the 3 dead letters? `millpond dead-letters list`" in asked.stderr
    assert json.loads(invoke("show", tmp_path / "one", "--json").stdout)["error"] == "the key is null"
    assert "the store has no dead letter" in invoke("show", tmp_path / "none").stderr


def test_letter_is_shown_whole(pond: Path) -> None:
    (sample,) = (group["sample"] for group in listed(pond, "--key", "cup"))
    shown = json.loads(invoke("show", pond, sample, "--json").stdout)
    assert (shown["letter"], shown["pipeline"], shown["key"]) == (sample, "orders", "cup")
    assert json.loads(shown["value"])["pieces"] == 0
    for part in ("Traceback", "float division by zero", "cup"):
        assert part in invoke("show", pond, sample).stdout

    missing = invoke("show", pond, "orders/0000000001/000099")
    assert (missing.exit_code, "no such dead letter" in missing.output) == (1, True)


def test_letters_are_retried_by_next_run(tmp_path: Path) -> None:
    """The request is shown while it waits."""
    pond = made(tmp_path / "pond")
    asked = json.loads(invoke("retry", pond, "--computation", "average", "--error", "Zero", "--json").stdout)
    assert asked == {"action": "retry", "letters": 2, "lost": {}, "pipelines": ["orders"]}
    assert 'retry {"computation":"average","error":"Zero"}' in invoke("list", pond).stderr

    run(pond, mended=True)
    assert [group["error"] for group in listed(pond)] == ["the key is null"]
    assert "waits" not in invoke("list", pond).stderr
    with mp.Store.open(pond, read_only=True) as store:
        states = store.rows_view("average").to_arrow()["state"].to_pylist()
    assert states == ["12.0", "12.0", "3.0"]


def test_letters_are_dropped_by_next_run(tmp_path: Path) -> None:
    pond = made(tmp_path / "pond")
    assert "drop 1 dead letter in" in invoke("drop", pond, "--key", "pot").stdout
    run(pond, mended=True)
    assert [group["letters"] for group in listed(pond)] == [1, 1]
    assert invoke("drop", pond, "--all").exit_code == 0
    run(pond, mended=True)
    assert listed(pond) == []


def test_request_is_withdrawn(tmp_path: Path) -> None:
    pond = made(tmp_path / "pond")
    invoke("retry", pond, "--all")
    (withdrawn,) = invoke("withdraw", pond, "--json").stdout.splitlines()
    assert json.loads(withdrawn) == {"pipeline": "orders", "action": "retry", "selection": "{}"}
    assert "no request waits" in invoke("withdraw", pond).stderr

    run(pond, mended=True)
    assert [group["letters"] for group in listed(pond)] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which letters"),
        (("--all", "--key", "cup"), "which letters"),
        (("--key", "nothing"), "no such dead letter"),
        (("--before", "yesterday"), "yesterday"),
        (("--timers", "--stream", "orders"), "--timers or --stream"),
    ],
)
def test_impossible_request_is_refused(pond: Path, arguments: tuple[str, ...], message: str) -> None:
    refused = invoke("retry", pond, *arguments)

    assert (refused.exit_code, message in refused.output) == (1, True)


def test_letter_without_whole_value_is_lost(tmp_path: Path) -> None:
    """A request that finds only lost letters is refused."""
    long = [{"id": "1", "item": "tea", "price": 1.0, "pieces": 0, "at": 1, "note": "x" * (1 << 21)}]
    run(tmp_path / "pond", mended=False, rows=long)

    (group,) = listed(tmp_path / "pond")
    assert (group["lost"], group["lost_because"]) == (1, "the letter does not have the whole value")
    refused = invoke("retry", tmp_path / "pond", "--all")
    assert (refused.exit_code, "no code can get" in refused.output) == (1, True)


def test_status_of_damaged_letters_is_error(tmp_path: Path) -> None:
    pond = made(tmp_path / "pond")
    for file in (pond / "rows").glob("computation=*dead*/*.parquet"):
        file.write_bytes(bytes(file.stat().st_size))

    result = CliRunner().invoke(main, ["status", str(pond)])

    assert result.exit_code != 0
    assert "the dead letters cannot be read" in result.stderr
