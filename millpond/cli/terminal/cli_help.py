"""Base classes of commands: help that ends with examples, and errors as messages instead of tracebacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Self

import click

from millpond.statestore.errors import MillpondError, did_you_mean
from millpond.statestore.visible import visible_lines

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_NO_CODES: Final[Mapping[int, str]] = MappingProxyType({})
# Given to each command, because click caches a command's help names when they are first asked for.
_HELP_NAMES: Final[dict[str, Any]] = {"context_settings": {"help_option_names": ["-h", "--help"]}}

EXIT_CODES: Final[Mapping[int, str]] = MappingProxyType(
    {0: "done", 1: "an error, of the store, the data or a service, or interrupted", 2: "wrong usage"}
)
"""The meaning of every command's exit codes, unless the command gives another."""


# Arguments of Python, as the library's errors show them, that are options of commands.
_ARGUMENT: Final = re.compile(r"\b(?:pass |say )?(zookeeper|on_held)='([^']*)'|\b(zookeeper_security)\b")


def _as_option(found: re.Match[str]) -> str:
    name, value, bare = found.groups()
    option = f"--{(name or bare).replace('_', '-')}"
    return option if value is None else f"give {option} {value}"


class Example(str):
    """A command line in the help that the test suite cannot run unchanged; other examples are plain text."""

    __slots__ = ("exit_code", "not_run")

    not_run: str | None  # what it needs that a test does not have
    exit_code: int

    def __new__(cls, text: str, *, not_run: str | None = None, exit_code: int = 0) -> Self:
        made = super().__new__(cls, text)
        made.not_run = not_run
        made.exit_code = exit_code
        return made


class TeachingCommand(click.Command):
    """A command whose help ends with ``examples``, complete command lines, and its exit codes."""

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
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        with formatter.section("Exit codes"):
            codes = sorted({**EXIT_CODES, **self.exit_codes}.items())
            formatter.write_dl([(str(code), meaning) for code, meaning in codes])
        super().format_epilog(ctx, formatter)


def command(
    *examples: str, exit_codes: Mapping[int, str] = _NO_CODES
) -> Callable[[Callable[..., Any]], TeachingCommand]:
    """Make a function a `TeachingCommand`."""
    return click.command(cls=TeachingCommand, examples=examples, exit_codes=exit_codes)


class TeachingGroup(TeachingCommand, click.Group):
    """A group of commands that turns a `MillpondError` into a message on standard error and exit code 1.

    A command of ``homes`` is imported from its module when it is used. Its function has the command's name.
    """

    command_class: type[click.Command] | None = TeachingCommand

    def __init__(self, *arguments: Any, homes: Mapping[str, str] = _NONE, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.homes = homes

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self.homes.get(cmd_name)
        if home is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(home), cmd_name.replace("-", "_"))  # of the package
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in names:
            ctx.fail(f"no such command: {args[0]!r}{did_you_mean(args[0], names)}; --help lists them")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            lines = (_ARGUMENT.sub(_as_option, str(error)), *getattr(error, "__notes__", ()))
            raise click.ClickException(visible_lines("\n".join(lines))) from error
