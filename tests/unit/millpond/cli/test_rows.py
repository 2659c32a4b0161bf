"""Typed keys in ``millpond rows``."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner

import millpond as mp
from millpond.cli.main import main

_AT = dt.datetime(2026, 11, 23, tzinfo=dt.UTC)
_NAMES = ["country", "card", "cents", "day", "raw"]
_ROWS = [
    {"country": "no", "card": 4711, "cents": Decimal("1.5"), "day": _AT.date(), "raw": b"\xff", "at": _AT},
    {"country": None, "card": 12, "cents": None, "day": None, "raw": None, "at": _AT},
]


class Tally(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set((context.state.get() or 0) + 1)


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "pond"
    pipeline = mp.Pipeline("p")
    rows = pipeline.inject("rows", key=_NAMES, at="at")
    rows.apply(Tally(), name="typed")
    rows.apply(Tally(), name="plain", key=lambda row: row["country"] or "")
    with mp.Store.open(path) as store:
        mp.LocalRunner(store, progress=False).run(pipeline, {"rows": _ROWS})
    return path


def shown(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["rows", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_table_has_column_for_each_key_value(pond: Path) -> None:
    lines = shown(pond, "typed").splitlines()

    assert lines[1].split() == [*_NAMES, "state", "timers", "hold", "superstep"]
    assert lines[3].split()[:5] == ["null", "12", "null", "null", "null"]
    assert lines[4].split()[:5] == ["no", "4711", "1.500000000000000000", "2026-11-23", "ff"]


def test_json_has_key_text_and_values(pond: Path) -> None:
    """A type that JSON lacks is text."""
    row = json.loads(shown(pond, "typed", "--json").splitlines()[1])

    assert mp.decode_key(row["key"])[:2] == ("no", 4711)
    assert [row[name] for name in _NAMES] == ["no", 4711, "1.500000000000000000", "2026-11-23", "ff"]


@pytest.mark.parametrize(
    "key", ['["no", 4711, 1.50, "2026-11-23", "ff"]', '["no", "4711", "1.5", "2026-11-23", "FF"]']
)
def test_key_option_takes_values_or_text(pond: Path, key: str) -> None:
    (found,) = shown(pond, "typed", "--key", key, "--json").splitlines()
    text = json.loads(found)["key"]

    assert json.loads(found)["card"] == 4711
    assert shown(pond, "typed", "--key", text, "--json").splitlines() == [found]
    assert len(shown(pond, "plain", "--key", "no", "--json").splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ('["no"', "no JSON list"),
        ('["no"]', "the key must have a value for each column"),
        ("no", "the key must have a value for each column"),
        ('["no", "x", 1, "", ""]', "card"),
    ],
)
def test_impossible_key_is_refused_with_columns(pond: Path, key: str, says: str) -> None:
    result = CliRunner().invoke(main, ["rows", str(pond), "typed", "--key", key])

    assert result.exit_code != 0
    assert says in result.output
