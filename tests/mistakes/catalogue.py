"""The table of mistakes in ``docs/errors.md``, and its comparison with the messages that users read.

Each row has a name, which marks its test. The test makes the mistake and passes its message to `Told` for
comparison, so the page cannot differ from the code.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.statestore.errors import MillpondError
from tests.tidy import ROOT

PAGE: Final = ROOT / "docs/errors.md"
FOLDER: Final = ROOT / "tests/mistakes"

_ROW: Final = re.compile(r"^\| `(?P<name>[a-z0-9-]+)` \|(?P<cells>.*)\|$", re.MULTILINE)
_READ: Final = re.compile(
    r"(?:`(?P<error>\w+)`|(?P<warning>a warning)|exit code (?P<code>\d)): (?P<words>.+)"
)
_LEFT_OUT: Final = "…"
_MARK: Final = "mistake"


@dataclass(frozen=True, slots=True)
class Mistake:
    """A row of the table.

    The words are the constant parts of the message; ``kind`` is the class of the error, ``warning``, or the
    exit code of a command.
    """

    name: str
    made: str
    kind: str
    words: tuple[str, ...]
    mended: str

    def check(self, kind: str, text: str, names: Sequence[str]) -> None:
        """Check the message's kind, its words in their order, and the names of the culprit and its place."""
        assert kind == self.kind, f"{self.name}: {kind}: {text}"
        place = 0
        for words in self.words:
            found = text.find(words, place)
            assert found >= 0, f"{self.name}: `{words}` is not in: {text}"
            place = found + len(words)
        assert names, f"{self.name}: what is wrong, and where, has a name"
        for name in names:
            assert name in text, f"{self.name}: {name!r} is not in: {text}"


def documented() -> list[Mistake]:
    """Return the rows of the page, in order."""
    return [_mistake(row["name"], row["cells"]) for row in _ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def _mistake(name: str, cells: str) -> Mistake:
    made, read, mended = (cell.strip() for cell in cells.split("|"))
    assert all(cell.count("`") % 2 == 0 for cell in (made, read, mended)), f"{name}: a code span has two ends"
    parts = _READ.fullmatch(read)
    assert parts is not None, (
        f"{name}: what is read is an error, a warning or an exit code, and its words: {read}"
    )
    words = tuple(part.strip() for part in parts["words"].split(_LEFT_OUT))
    kind = parts["error"] or ("warning" if parts["warning"] else parts["code"])
    return Mistake(name, made, kind, tuple(filter(None, words)), mended)


def names_of_tests() -> list[str]:
    """Return the marks of tests that use ``told``: without it they compare nothing."""
    return [
        name
        for path in sorted(FOLDER.glob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and "told" in {argument.arg for argument in node.args.args}
        for name in _marks(node)
    ]


def _marks(test: ast.FunctionDef) -> Iterator[str]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == f"pytest.mark.{_MARK}":
            yield from (str(ast.literal_eval(argument)) for argument in decorator.args)


class Told:
    """The messages to the user of one test.

    Arguments are the test's row, and its log.
    """

    def __init__(self, mistake: Mistake, log: pytest.LogCaptureFixture) -> None:
        self.mistake = mistake
        self.has_told = False
        self._log = log

    @contextmanager
    def by_error(self, *names: object) -> Iterator[None]:
        """Expect the error of the row, with these names in its message."""
        with pytest.raises(MillpondError) as caught:
            yield
        text = str(caught.value)
        assert "\n" not in text, text
        self._check(type(caught.value).__name__, text, names)

    @contextmanager
    def by_warning(self, *names: object) -> Iterator[None]:
        with self._log.at_level(logging.WARNING, logger="millpond"):
            yield
        said = [record.getMessage() for record in self._log.records if record.levelno == logging.WARNING]
        meant = next((text for text in said if self.mistake.words[0] in text), f"nothing like it: {said}")
        self._check("warning", meant, names)

    def by_command(self, *arguments: object, names: Sequence[object]) -> None:
        """Expect the exit code of the row, and its words on standard error."""
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert "Traceback" not in result.output, result.output
        self._check(str(result.exit_code), " ".join(result.stderr.split()), names)

    def by_text(self, kind: str, text: str, *names: object) -> None:
        """Check the error of another process: its class, its text, and the names in it."""
        self._check(kind, text, names)

    def _check(self, kind: str, text: str, names: Sequence[object]) -> None:
        self.has_told = True
        self.mistake.check(kind, text, list(map(str, names)))
