"""
The documents keep up with the code: links lead somewhere, what they name exists.
"""

from __future__ import annotations

import ast

import pytest

import millpond as mp
from millpond.tools.command_line import main
from tests.documents import Document, documents, readme
from tests.tidy import ROOT

DOCUMENTS = pytest.mark.parametrize(
    "document", documents(), ids=lambda document: str(document.path.relative_to(ROOT))
)


@DOCUMENTS
def test_links_lead_somewhere(document: Document) -> None:
    """
    Every link within the repository names a file that is there, and a heading in it.
    """
    for link in document.links():
        name, _, anchor = link.partition("#")
        target = Document((document.path.parent / name).resolve() if name else document.path)

        assert target.path.exists(), link
        assert not anchor or anchor in target.anchors(), link


@DOCUMENTS
def test_named_tests_exist(document: Document) -> None:
    """
    A test that a document calls a proof is in the file that it names.
    """
    for path, name in document.tests():
        code = (ROOT / path).read_text(encoding="utf-8")

        assert not name or f"def {name}(" in code, f"{path}::{name}"


@DOCUMENTS
def test_python_in_documents_compiles(document: Document) -> None:
    """
    Code in documents is Python, and what it takes from ``mp`` is public.
    """
    for code in document.blocks("python"):
        names = {
            node.attr
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mp"
        }
        assert names <= set(mp.__all__)


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_is_documented(command: str) -> None:
    """
    Each command of ``millpond`` has help, and its place in the page about looking inside.
    """
    page = Document(ROOT / "docs" / "inspecting.md")

    assert main.commands[command].help
    assert f"millpond {command} " in page.text


def test_every_design_is_in_the_index() -> None:
    """
    A protocol's page is found from the index.
    """
    links = Document(ROOT / "docs" / "index.md").links()

    assert {f"design/{path.name}" for path in (ROOT / "docs" / "design").glob("*.md")} <= set(links)


def test_readme_names_targets_that_exist() -> None:
    """
    Each ``make`` command in the README is a target of the Makefile.
    """
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = [line.split()[1] for line in readme().text.splitlines() if line.startswith("make ")]

    assert targets
    assert all(f"\n{target}:" in makefile for target in targets)
