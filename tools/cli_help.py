"""
Base classes of commands: help that ends with examples, and errors as messages instead of tracebacks.
"""

from __future__ import annotations

from typing import Any

import click

from millpond.statestore.errors import MillpondError

__all__ = ["TeachingCommand", "TeachingGroup"]


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

    def invoke(self, ctx: click.Context) -> Any:
        """
        Run the command; a `MillpondError` is reported with its notes and without a traceback.
        """
        try:
            return super().invoke(ctx)
        except MillpondError as error:
            lines = (str(error), *getattr(error, "__notes__", ()))
            raise click.ClickException("\n".join(lines)) from error
