"""Pipelines and functions named ``module:name`` on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import millpond as mp
from millpond.cli.terminal.inputs import load_app, load_pipeline, wrong_usage
from millpond.statestore.errors import InvalidError

CODE = """
import millpond as mp

made = mp.Pipeline("made")
number = 7

def pipeline():
    return mp.Pipeline("returned")

def broken():
    raise KeyError("no such thing")

class Place:
    pipeline = mp.Pipeline("placed")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "app_of_test.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "broken_of_test.py").write_text("import nothing_of_the_kind\n", encoding="utf-8")
    (tmp_path / "raises_of_test.py").write_text("\n1 / 0\n", encoding="utf-8")
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "jobs.py").write_text(CODE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [known for known in sys.modules if "_of_test" in known]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("app_of_test:made", "made"),
        ("app_of_test:pipeline", "returned"),
        ("app_of_test:Place.pipeline", "placed"),
        ("package_of_test.jobs:pipeline", "returned"),
    ],
)
def test_name_may_be_pipeline_or_function_returning_one(text: str, name: str) -> None:
    """It is in a module or a package of the current folder."""
    found = load_pipeline(text)

    assert isinstance(found, mp.Pipeline)
    assert found.name == name


def test_load_app_returns_other_objects_uncalled() -> None:
    assert load_app("app_of_test:number") == 7
    assert callable(load_app("app_of_test:pipeline"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("app_of_test", "named module:name"),
        ("app_of_test:", "named module:name"),
        ("ap_of_test:made", "did you mean 'app_of_test'"),
        ("package_of_test.job:made", "the package package_of_test.* did you mean 'jobs'"),
        ("app_of_test:mades", "did you mean 'made'"),
        ("app_of_test:Place.pipelines", "app_of_test.Place has no such name; did you mean 'pipeline'"),
        (
            "broken_of_test:made",
            "importing broken_of_test failed: ModuleNotFoundError: No module named 'nothing_of",
        ),
        ("raises_of_test:made", "importing raises_of_test failed: ZeroDivisionError"),
        ("app_of_test:number", "neither a pipeline nor a function"),
        ("app_of_test:broken", "calling app_of_test:broken failed: KeyError"),
    ],
)
def test_missing_name_is_reported_with_nearest(text: str, reason: str) -> None:
    with pytest.raises(InvalidError, match=reason):
        load_pipeline(text)


def test_failure_of_user_code_is_located() -> None:
    """The note has no line of ours or of the import system."""
    with pytest.raises(InvalidError) as failed:
        load_app("raises_of_test:made")
    (note,) = failed.value.__notes__

    assert 'raises_of_test.py", line 2' in note
    assert "inputs.py" not in note
    assert "importlib" not in note


def test_wrong_name_is_wrong_usage() -> None:
    with (
        pytest.raises(click.UsageError, match=r"(?s)importing raises_of_test failed.*line 2") as refused,
        wrong_usage(),
    ):
        load_app("raises_of_test:made")

    assert refused.value.exit_code == 2
