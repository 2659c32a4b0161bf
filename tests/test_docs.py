"""The agreement of documents and code: links, paths, modules, classes, tests and commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import click
import pytest

import millpond as mp
from millpond.cli.main import main
from tests.documents import Document, documents, readme
from tests.tidy import LINKED, ROOT

_PATH: Final = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
_HOMES: Final = (*LINKED, "millpond/cli", "millpond/testing")
_FOLDERS: Final = (*LINKED, "millpond", "tests", "docs", "examples", "benchmarks", ".ci")
_MODULE: Final = re.compile(r"(?:python -m )?((?:millpond|benchmarks|examples)(?:\.\w+)+)\b(?!\.<)")
_CLASS: Final = re.compile(r"([A-Z][a-z]+(?:[A-Z][a-z]*)+)(?:\.(\w+))?(?:\(.*)?")
_OTHERS: Final = frozenset(
    ("AfterCount", "DataFrame", "ModuleNotFoundError", "PostgreSQL", "FileSystemBased")
)

ABOUT_CODE: Final = ("docs/architecture.md", "CONTRIBUTING.md", "docs/operations.md", "docs/inspecting.md")
"""The documents whose class names are all ours."""

DOCUMENTS = pytest.mark.parametrize(
    "document", documents(), ids=lambda document: str(document.path.relative_to(ROOT))
)


@DOCUMENTS
def test_links_lead_somewhere(document: Document) -> None:
    """The target's heading is checked, too."""
    for link in document.links():
        name, _, anchor = link.partition("#")
        target = Document((document.path.parent / name).resolve() if name else document.path)

        assert target.path.exists(), link
        assert not anchor or anchor in target.anchors(), link


@DOCUMENTS
def test_named_tests_exist(document: Document) -> None:
    for path, name in document.tests():
        code = (ROOT / path).read_text(encoding="utf-8")

        assert not name or f"def {name}(" in code, f"{path}::{name}"


def _missing_paths(codes: list[str]) -> Iterator[str]:
    """Return words that look like a path from the root without being one."""
    for code in codes:
        path, _, _ = code.partition("::")
        if (
            _PATH.fullmatch(path)
            and path.partition("/")[0] in _FOLDERS
            and "/" in path
            and not any(ROOT.glob(path))
        ):
            yield code


def _missing_modules(codes: list[str]) -> Iterator[str]:
    """Return words that look like a module of Millpond, or a name in one, without being either."""
    for code in codes:
        for name in _MODULE.findall(code):
            if not _is_module(name) and not _is_in_module(name):
                yield code


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _is_in_module(name: str) -> bool:
    module, _, member = name.rpartition(".")
    path = ROOT / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return file.is_file() and re.search(rf"\b{member}\b", file.read_text(encoding="utf-8")) is not None


@lru_cache(maxsize=1)
def _classes() -> dict[str, set[str]]:
    """Return every class of the package, with its members."""
    members: dict[str, set[str]] = {}
    for room in _HOMES:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    members.setdefault(node.name, set()).update(_members(node))
    return members


def _members(kind: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(kind):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _missing_classes(codes: list[str]) -> Iterator[str]:
    """Return words that look like a class of Millpond, or a member of one, without being either."""
    for code in codes:
        if match := _CLASS.fullmatch(code.removeprefix("mp.")):
            name, member = match.groups()
            is_ours = name in _classes() and (member is None or member in _classes()[name])
            if not is_ours and name not in _OTHERS:
                yield code


@DOCUMENTS
def test_named_paths_and_modules_exist(document: Document) -> None:
    codes = document.code()

    assert [*_missing_paths(codes), *_missing_modules(codes)] == []


@pytest.mark.parametrize("name", ABOUT_CODE)
def test_named_classes_exist(name: str) -> None:
    assert list(_missing_classes(Document(ROOT / name).code())) == []


def test_missing_names_are_found() -> None:
    paths = [
        "executor/nothing.py",
        "tests/unit/",
        "gc/*.py",
        "a/b",
        "tests/test_docs.py::test_it",
        "docs/none/",
    ]
    modules = [
        "millpond.gc.nothing",
        "millpond.gc.compaction",
        "python -m benchmarks.nothing",
        "millpond.testing.simulate",
    ]
    classes = ["LocalRun.nothing", "LocalRun.step", "NoSuchClass", "mp.LocalRunner", "state"]

    assert list(_missing_paths(paths)) == ["executor/nothing.py", "docs/none/"]
    assert list(_missing_modules(modules)) == ["millpond.gc.nothing", "python -m benchmarks.nothing"]
    assert list(_missing_classes(classes)) == ["LocalRun.nothing", "NoSuchClass"]


def test_map_of_rooms_has_every_folder() -> None:
    named = set(Document(ROOT / "CONTRIBUTING.md").code())
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for room in _HOMES
        for path in (ROOT / room).rglob("__init__.py")
    }

    assert {f"{folder}/" for folder in folders if folder != "migrations/versions"} <= named


@DOCUMENTS
def test_python_in_documents_compiles(document: Document) -> None:
    """Names taken from ``mp`` must be public."""
    for code in document.blocks("python"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mp"
        }
        assert names <= set(mp.__all__)


@pytest.mark.parametrize("command", main.list_commands(click.Context(main)))
def test_every_command_is_documented(command: str) -> None:
    page = Document(ROOT / "docs" / "reference" / "command-line.md")
    found = main.get_command(click.Context(main), command)

    assert found is not None
    assert found.help
    assert f"\n$ millpond {command} --help\n" in page.text


def test_every_design_is_in_the_index() -> None:
    links = Document(ROOT / "docs" / "index.md").links()

    assert {f"design/{path.name}" for path in (ROOT / "docs" / "design").glob("*.md")} <= set(links)


def test_readme_names_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in readme().text.splitlines() if line.startswith("make ")]

    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
