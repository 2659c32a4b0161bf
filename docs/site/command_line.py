"""
Writes ``docs/reference/command-line.md`` out of the help of each command: ``python docs/site/command_line.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from click.testing import CliRunner

from millpond.tools.command_line import main

__all__ = ["PAGE", "page"]

PAGE: Final = Path(__file__).resolve().parent.parent / "reference" / "command-line.md"

_TERMINAL_WIDTH: Final = 78
_BEGINNING: Final = """# The command line

`millpond` looks into stores, verifies, repairs and cleans them. All commands but `gc`, `repair` and `adopt` only
read: they take no lease and start no server, so they may be used while a pipeline runs.

This page is made of the help of each command.
"""


def page() -> str:
    """
    The page, as the commands are now.
    """
    sections = (f"## {name}\n\n{_help(name)}" for name in main.homes)
    return "\n".join([_BEGINNING, _help(), *sections])


def _help(*command: str) -> str:
    shown = CliRunner().invoke(
        main, [*command, "--help"], prog_name="millpond", terminal_width=_TERMINAL_WIDTH
    )
    return f"```console\n$ {' '.join(['millpond', *command])} --help\n{shown.stdout.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
