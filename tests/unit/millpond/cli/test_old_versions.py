"""Versions that cannot be read: one sentence wherever a version can be given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from millpond.cli.main import main
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.difference import compare_stores
from millpond.executor.replay.fork import fork_store
from millpond.statestore.errors import ConflictError, DataError, InvalidError, MillpondError
from millpond.statestore.store import Store
from tests.fixtures.computations import Count

pytestmark = pytest.mark.zookeeper

COLLECTED = "that version has been collected: it was older than the retention"
MISSING = "there is no such table version (see `millpond history`)"
KEPT_VERSION, COLLECTED_VERSION = 7, 10
NONE = "version must be a whole number"


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("versions") / "pond"
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Count(), name="counts")
    rows = [{"k": f"k{number % 3}", "t": number, "n": 1} for number in range(9)]
    with Store.open(path) as store:
        reached = []
        for stop in (3, 6, 9):
            LocalRunner(store, progress=False).run(pipeline, {"in": rows[:stop]}, finish=False)
            reached.append(store.snapshot().version)
        assert reached[1:] == [KEPT_VERSION, COLLECTED_VERSION]
        store.savepoint("kept", KEPT_VERSION)
    assert invoke("gc", path, "--keep", "0s").exit_code == 0
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def uses(store: Store, folder: Path) -> dict[str, Callable[[Any], object]]:
    return {
        "snapshot": store.snapshot,
        "sql": store.sql,
        "rows_view": lambda version: store.rows_view("counts", version),
        "reading": lambda version: store.reading(version).__enter__(),
        "fork": lambda version: fork_store(store, folder / "fork", version),
        "diff": lambda version: compare_stores(store, store, version=version),
    }


@pytest.mark.parametrize(
    ("version", "error", "sentence"),
    [
        (COLLECTED_VERSION, ConflictError, COLLECTED),
        (999, DataError, MISSING),
        (2**70, DataError, MISSING),
        (-1, InvalidError, NONE),
        (True, InvalidError, NONE),
        ("4", InvalidError, NONE),
        (4.0, InvalidError, NONE),
    ],
)
def test_version_is_refused_with_one_sentence(
    pond: Path, tmp_path: Path, version: Any, error: type[MillpondError], sentence: str
) -> None:
    with Store.open(pond, read_only=True) as store:
        for name, use in uses(store, tmp_path).items():
            with pytest.raises(error) as caught:
                use(version)
            assert str(caught.value).startswith(sentence), name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("version", "sentence"), [(COLLECTED_VERSION, COLLECTED), (999, MISSING)])
@pytest.mark.parametrize(
    "arguments",
    [
        ("rows", "POND", "counts"),
        ("sql", "POND", "select 1"),
        ("export", "POND", "NEW"),
        ("fork", "POND", "NEW"),
        ("diff", "POND", "POND"),
        ("rewind", "POND", "--dry-run"),
        ("savepoint", "POND", "name"),
        ("dead-letters", "list", "POND"),
        ("dead-letters", "show", "POND", "x"),
    ],
)
def test_command_refuses_version_with_one_sentence(
    pond: Path, tmp_path: Path, arguments: tuple[str, ...], version: int, sentence: str
) -> None:
    places = {"POND": pond, "NEW": tmp_path / "new"}
    said = invoke(*(places.get(word, word) for word in arguments), f"--version={version}")

    assert said.exit_code not in {0, 2}
    assert said.stderr.startswith(f"Error: {sentence}")
    assert list(tmp_path.iterdir()) == []


def test_version_of_savepoint_is_read(pond: Path) -> None:
    with Store.open(pond, read_only=True) as store:
        assert store.rows_view("counts", KEPT_VERSION).to_arrow().num_rows == 3
