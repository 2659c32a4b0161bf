"""
The documents of the repository, read for what tests can hold them to.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.tidy import ROOT

__all__ = ["Document", "documents", "readme"]

_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@dataclass(frozen=True, slots=True)
class Document:
    """
    A Markdown file.
    """

    path: Path

    @property
    def text(self) -> str:
        """
        All of it.
        """
        return self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        """
        Its fenced code blocks in a language, in order.
        """
        return [code for name, code in _BLOCK.findall(self.text) if name == language]

    def links(self) -> list[str]:
        """
        The targets of its links within the repository.
        """
        return [target for target in _LINK.findall(_BLOCK.sub("", self.text)) if "://" not in target]

    def anchors(self) -> set[str]:
        """
        What its headings can be linked by.
        """
        return {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in _HEADING.findall(self.text)
        }

    def tests(self) -> list[tuple[str, str]]:
        """
        The test files that it names, each with the test, or with "" for all of them.
        """
        return _TEST.findall(self.text)


def documents() -> list[Document]:
    """
    All Markdown files at the root and in ``docs/``.
    """
    return [Document(path) for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])]


def readme() -> Document:
    """
    The first thing that people read.
    """
    return Document(ROOT / "README.md")
