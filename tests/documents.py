"""The documents of the repository, as checked by tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.tidy import ROOT

_BLOCK: Final = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*) -->\n\n?)?(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_CODE: Final = re.compile(r"`([^`\n]+)`")
_BRACES: Final = re.compile(r"^(.*)\{([^{}]*)\}(.*)$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code.

    Attributes:
        language: the word after the fence.
        text: its contents.
        note: the comment before it, which readers do not see: ``file: NAME`` or ``not run: REASON``.
        line: where it begins.
    """

    language: str
    text: str
    note: str
    line: int


@dataclass(frozen=True, slots=True)
class Document:
    """A Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Return its path from the root."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """Return its text without code blocks and comments."""
        return _COMMENT.sub("", _BLOCK.sub("", self.text))

    def all_blocks(self) -> list[Block]:
        """Return its fenced code blocks, in order."""
        text = self.text
        return [
            Block(
                language=match["language"],
                text=re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
                note=match["note"] or "",
                line=text.count("\n", 0, match.start("language")) + 1,
            )
            for match in _BLOCK.finditer(text)
        ]

    @property
    def uses_spark(self) -> bool:
        """Return True if a block that is run starts Spark."""
        return any(
            "spark_session(" in block.text and not block.note.startswith("not run")
            for block in self.all_blocks()
        )

    def blocks(self, language: str) -> list[str]:
        """Return its fenced code blocks in a language, in order."""
        return [block.text for block in self.all_blocks() if block.language == language]

    def links(self) -> list[str]:
        """Return the targets of its links within the repository."""
        return [target for target in _LINK.findall(self.prose) if "://" not in target]

    def anchors(self) -> set[str]:
        """Return the anchors of its headings."""
        return {
            re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            for heading in _HEADING.findall(_BLOCK.sub("", self.text))
        }

    def tests(self) -> list[tuple[str, str]]:
        """Return its named test files, each with the test, or with "" for all of them."""
        return _TEST.findall(self.text)

    def code(self) -> list[str]:
        """Return the code spans of its prose; ``a/{b,c}.py`` counts as two."""
        return [name for code in _CODE.findall(self.prose) for name in _expanded(code)]


def _expanded(code: str) -> list[str]:
    match = _BRACES.match(code)
    return [f"{match[1]}{one.strip()}{match[3]}" for one in match[2].split(",")] if match else [code]


def documents() -> list[Document]:
    """Return all Markdown files at the root and in ``docs/``."""
    return [Document(path) for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])]


def pages_to_run() -> list[Document]:
    """Return the pages whose blocks are all run."""
    docs = ROOT / "docs"
    named = [docs / name for name in ("tutorial.md", "windows.md", "watermarks.md", "spark.md")]
    return [Document(path) for path in [*named, *sorted((docs / "how-to").glob("*.md"))]]


def readme() -> Document:
    return Document(ROOT / "README.md")
