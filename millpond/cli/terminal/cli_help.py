"""Base classes of commands: help that ends with examples, and errors as messages instead of tracebacks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Self

import click

from millpond.statestore.errors import MillpondError, did_you_mean

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_NO_CODES: Final[Mapping[int, str]] = MappingProxyType({})

_HELP_NAMES: Final[dict[str, Any]] = {"context_settings": {"help_option_names": ["-h", "--help"]}}
"""Of each command: click keeps the names that it has when they are asked for first, with its group around it or not."""

EXIT_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {0: "done", 1: "an error, of the store, the data or a service, or interrupted", 2: "wrong usage"}
)
"""What the exit code of every command says, unless the command says more of its own."""


class Example(str):
    """A command line in the help that a test does not run as it is, and why; other examples are plain text.

    Args:
        text: the command line, as it is shown.
        not_run: what it needs that a test does not have.
        exit_code: what it ends with.
    """

    __slots__ = ("exit_code", "not_run")

    not_run: str | None
    exit_code: int

    def __new__(cls, text: str, *, not_run: str | None = None, exit_code: int = 0) -> Self:
        """Make the text, with what is known of it."""
        made = super().__new__(cls, text)
        made.not_run = not_run
        made.exit_code = exit_code
        return made


def _write_examples(formatter: click.HelpFormatter, examples: tuple[str, ...]) -> None:
    if examples:
        with formatter.section("Examples"):
            for example in examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def _write_exit_codes(formatter: click.HelpFormatter, own: Mapping[int, str]) -> None:
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), meaning) for code, meaning in sorted({**EXIT_CODES, **own}.items())])


class TeachingCommand(click.Command):
    """A command whose help ends with examples and exit codes.

    Args:
        examples: complete command lines, shown unchanged at the end of the help; see `Example`.
        exit_codes: what its exit codes say, where that is not what `EXIT_CODES` says.
    """

    def __init__(
        self,
        *arguments: Any,
        examples: tuple[str, ...] = (),
        exit_codes: Mapping[int, str] = _NO_CODES,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **_HELP_NAMES | options)
        self.examples = examples
        self.exit_codes = exit_codes

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the exit codes, and what click would."""
        _write_examples(formatter, self.examples)
        _write_exit_codes(formatter, self.exit_codes)
        super().format_epilog(ctx, formatter)


class TeachingGroup(click.Group):
    """A group of commands that turns a `MillpondError` into a message on standard error and exit code 1.

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
        super().__init__(*arguments, **_HELP_NAMES | options)
        self.examples = examples
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, sorted."""
        return sorted({*super().list_commands(ctx), *self.homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command, out of its module."""
        home = self.homes.get(cmd_name)
        if home is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(home), home.rpartition(".")[2])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is meant; of an unknown one, the nearest is told."""
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            ctx.fail(f"no such command: {args[0]!r}{did_you_mean(args[0], names)}; --help lists them")
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the exit codes, and what click would."""
        _write_examples(formatter, self.examples)
        _write_exit_codes(formatter, _NO_CODES)
        super().format_epilog(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a `MillpondError` is reported with its notes and without a traceback."""
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            lines = (str(error), *getattr(error, "__notes__", ()))
            raise click.ClickException("\n".join(lines)) from error
