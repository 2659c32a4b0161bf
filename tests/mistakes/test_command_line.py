"""Mistakes on the command line: one sentence on standard error, without a traceback; 2 for wrong usage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import millpond as mp
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, counting, held_in_memory, run

RUN = ("run", "searches_of_mistakes:pipeline", "--store", "pond")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The current folder, with a store and a pipeline's module."""
    with mp.Store.open(tmp_path / "pond", leases=held_in_memory()) as store:
        run(counting(), ROWS, store, finish=False)
    (tmp_path / "searches_of_mistakes.py").write_text(
        "from tests.mistakes.code_of_users import counting\n\npipeline = counting()\n"
    )
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


@pytest.mark.mistake("command-misspelt")
def test_unknown_command(told: Told) -> None:
    told.by_command("statsu", "pond", names=["statsu", "status"])


@pytest.mark.mistake("command-option-misspelt")
def test_unknown_option(told: Told) -> None:
    told.by_command("rows", "pond", "counter", "--kye", "cat", names=["--kye", "--key"])


@pytest.mark.mistake("command-without-store")
def test_missing_store(told: Told, folder: Path) -> None:
    told.by_command("status", "ponds", names=["ponds"])


@pytest.mark.mistake("app-without-colon")
def test_code_without_a_name(told: Told) -> None:
    told.by_command("run", "searches.py", "--store", "pond", names=["searches.py"])


@pytest.mark.mistake("app-module-misspelt")
def test_missing_module(told: Told, folder: Path) -> None:
    told.by_command(
        "run",
        "search_of_mistakes:pipeline",
        "--store",
        "pond",
        names=["search_of_mistakes", "'searches_of_mistakes'"],
    )


@pytest.mark.mistake("app-name-misspelt")
def test_missing_name_of_a_module(told: Told, folder: Path) -> None:
    told.by_command(
        "run", "searches_of_mistakes:pipelines", "--store", "pond", names=["pipelines", "'pipeline'"]
    )


@pytest.mark.mistake("input-option-of-no-form")
def test_input_without_its_stream(told: Told, folder: Path) -> None:
    told.by_command(*RUN, "--input", "queries.json", names=["queries.json", "STREAM=PATH"])


@pytest.mark.mistake("input-option-misspelt")
def test_input_of_an_unknown_stream(told: Told, folder: Path) -> None:
    told.by_command(*RUN, "--input", "querys=queries.json", names=["querys", "'queries'"])


@pytest.mark.mistake("input-file-missing")
def test_missing_file(told: Told, folder: Path) -> None:
    told.by_command(*RUN, "--input", "queries=nowhere.json", names=["nowhere.json"])


@pytest.mark.mistake("input-file-of-no-format")
def test_file_of_an_unknown_format(told: Told, folder: Path) -> None:
    (folder / "queries.xlsx").touch()

    told.by_command(*RUN, "--input", "queries=queries.xlsx", names=["queries.xlsx", ".parquet"])


@pytest.mark.mistake("rows-of-no-computation")
def test_rows_of_an_unknown_computation(told: Told, folder: Path) -> None:
    told.by_command("rows", "pond", "countr", names=["countr", "'counter'"])


@pytest.mark.mistake("sql-of-no-table")
def test_query_of_an_unknown_table(told: Told, folder: Path) -> None:
    told.by_command("sql", "pond", "select * from countr", names=["countr", "counter"])


@pytest.mark.mistake("take-back-misspelt")
def test_table_to_take_back_that_is_none(told: Told, folder: Path) -> None:
    """The store is as it was, and no folder of that name is made."""
    for table in ("counts", "out"):
        (folder / table / "_delta_log").mkdir(parents=True)
    before = sorted((folder / "pond" / "rows" / "_delta_log").iterdir())
    told.by_command(
        "rewind", "pond", "--version", "1", "--take-back", "count", "--yes", names=["count", "'counts'"]
    )

    assert sorted((folder / "pond" / "rows" / "_delta_log").iterdir()) == before
    assert not (folder / "count").exists()


@pytest.mark.mistake("version-of-no-savepoint")
def test_version_that_is_no_savepoint(told: Told, folder: Path) -> None:
    told.by_command("rows", "pond", "counter", "--version", "yesterday", names=["yesterday", "none"])
