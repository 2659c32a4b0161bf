"""
Base classes of commands: help that ends with examples, and errors as messages instead of tracebacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import click

from millpond.statestore.errors import MillpondError

__all__ = ["TeachingCommand", "TeachingGroup"]

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


def _write_examples(formatter: click.HelpFormatter, examples: tuple[str, ...]) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class TeachingCommand(click.Command):
    """
    A command whose help ends with examples.

    Args:
        examples: complete command lines, shown unchanged at the end of the help.
    """

    def __init__(self, *arguments: Any, examples: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.examples = examples

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """
        Write the examples, and what click would.
        """
        _write_examples(formatter, self.examples)
        super().format_epilog(ctx, formatter)


class TeachingGroup(click.Group):
    """
    A group of commands that turns a `MillpondError` into a message on standard error and exit code 1.

    Args:
        examples: complete command lines, shown unchanged at the end of the help.
        homes: modules by command; each is imported when its command is used, and has the command under its own
            last name.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: tuple[str, ...] = (),
        homes: Mapping[str, str] = _NONE,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.examples = examples
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        """
        The names of the commands, sorted.
        """
        return sorted({*super().list_commands(ctx), *self.homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """
        A command, out of its module.
        """
        home = self.homes.get(cmd_name)
        if home is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(home), home.rpartition(".")[2])
        return command

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """
        Write the examples, and what click would.
        """
        _write_examples(formatter, self.examples)
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """
        Run the command; a `MillpondError` is reported with its notes and without a traceback.
        """
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            lines = (str(error), *getattr(error, "__notes__", ()))
            raise click.ClickException("\n".join(lines)) from error
