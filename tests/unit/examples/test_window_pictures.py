"""The pictures of docs/windows.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import millpond as mp
from examples.streaming102.pictures import MODES, TRIGGERS, WINDOWS, draw_all, names
from tests.documents import Document
from tests.tidy import ROOT

_PAGE = Document(ROOT / "docs" / "windows.md")
_FOLDER = ROOT / "docs" / "pictures"
_SIZE_MAX = 50_000


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _named() -> set[str]:
    return {link.removeprefix("pictures/") for link in _PAGE.links() if link.startswith("pictures/")}


def test_generator_draws_exactly_the_pictures_of_the_document(tmp_path: Path) -> None:
    draw_all(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == set(names()) == _named()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_pictures_are_in_the_repository_and_below_50_kb() -> None:
    sizes = {name: (_FOLDER / name).stat().st_size for name in names()}

    assert max(sizes.values()) < _SIZE_MAX


def test_every_picture_in_the_repository_is_shown_by_a_page() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    pictures = {path.name for path in _FOLDER.iterdir() if path.suffix in {".png", ".svg"}}

    assert pictures == set(re.findall(r"pictures/([\w.-]+\.(?:png|svg))", text))


@pytest.mark.parametrize(
    ("base", "pictures", "others"),
    [
        (mp.Trigger, set(TRIGGERS), {"trigger"}),
        (mp.WindowFn, set(WINDOWS), {"window_fn"}),
    ],
    ids=["triggers", "windows"],
)
def test_every_public_trigger_and_window_function_has_a_picture(
    base: type, pictures: set[str], others: set[str]
) -> None:
    kinds = {name: getattr(mp, name) for name in mp.__all__} | vars(mp.windows)
    public = {
        _snake(name) for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base)
    }

    assert public - pictures == others


def test_every_accumulation_mode_has_a_picture() -> None:
    assert {str(mode) for mode in mp.windows.Accumulation} <= set(MODES)


def test_transcripts_named_in_the_document_exist() -> None:
    rows = [line for line in _PAGE.text.splitlines() if "<br>transcript" in line]
    named = [re.findall(r"<br>transcript `(\w+)`", row) for row in rows]
    known = {
        document["name"]
        for path in (ROOT / "tests" / "transcripts").glob("*.yaml")
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    }

    assert len(rows) == len(TRIGGERS)
    assert {name for row in named for name in row} <= known
    assert all(named)
