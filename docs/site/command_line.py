"""Writes ``docs/reference/command-line.md`` out of the help of each command: ``python docs/site/command_line.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from click.testing import CliRunner

from millpond.cli.main import main

__all__ = ["PAGE", "page"]

PAGE: Final = Path(__file__).resolve().parent.parent / "reference" / "command-line.md"

_TERMINAL_WIDTH: Final = 78
_BEGINNING: Final = """# The command line

`millpond` runs pipelines, and looks into their stores, verifies, rewinds, repairs and cleans them. The help of
`millpond` itself says which commands change a store; all others take no lease and start no server, so they may be used
while a pipeline runs.

- **Exit codes**: 0 is done, 1 an error of the store, the data or a service, or what a command was asked to find, 2
  wrong usage, 3 a run with `--strict` that is done, but not with all of its records as they were meant. The help of
  each command states them.
- **`--json`**: each command prints one JSON object, or one a line where it lists several, with the names of the Python
  API. Messages go to standard error, so standard output is the result alone.
- **Completion**: `millpond completion bash`, `zsh` or `fish` prints a script for your shell.
- **Progress** is shown on standard error, in a terminal only; `millpond run` writes it as JSON where that is a pipe.

The examples of each command are run by the test suite. This page is made of the help of each command.
"""


def page() -> str:
    """Return the page that the commands make now."""
    sections = (f"## {' '.join(names)}\n\n{_help(*names)}" for names in _names())
    return "\n".join([_BEGINNING, _help(), *sections])


def _names() -> Iterator[tuple[str, ...]]:
    for name in main.homes:
        yield (name,)
        command = main.get_command(click.Context(main), name)
        if isinstance(command, click.Group):
            yield from ((name, part) for part in command.commands)


def _help(*command: str) -> str:
    shown = CliRunner().invoke(
        main, [*command, "--help"], prog_name="millpond", terminal_width=_TERMINAL_WIDTH
    )
    return f"```console\n$ {' '.join(['millpond', *command])} --help\n{shown.stdout.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
