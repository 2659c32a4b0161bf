"""Kinds of options that recur, and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

import click

Command: TypeAlias = Callable[..., Any]
Option: TypeAlias = Callable[[Command], Command]


def option(usage: str, text: str, *, choices: Iterable[str] | None = None, **settings: Any) -> Option:
    """Add an option with a value, shown with its default.

    ``usage`` is ``--name``, with ``=METAVAR`` if the value needs one, and the parameter's name if it is another.
    """
    first, *parameter = usage.split()
    name, _, metavar = first.partition("=")
    kind = None if choices is None else click.Choice([*choices])
    given = {"type": kind, "metavar": metavar or None, "show_default": True, **settings}
    return click.option(name, *parameter, help=text, **given)


def several(usage: str, text: str) -> Option:
    """Add an option that may be repeated; the command gets a tuple of texts."""
    return option(usage, text, multiple=True)


def options(*added: Option) -> Option:
    """Add several options to a command, in this order."""

    def add(command: Command) -> Command:
        for one in reversed(added):
            command = one(command)
        return command

    return add


def flag(names: str, text: str) -> Option:
    return click.option(*names.split(), is_flag=True, help=text)


def number(name: str, text: str, default: int | None = None, *, least: int = 1) -> Option:
    return option(f"{name}=N", text, type=click.IntRange(min=least), default=default)


def json_option(text: str) -> Option:
    """Add the option --json to a command, as ``as_json``."""
    return flag("--json as_json", text)


cache_option: Final = number("--cache-mib", "Memory for rows of state, of each process.", 512, least=0)
catalog_option: Final = option(
    "--catalog=URL",
    "SQLAlchemy URL of the catalog, unless in the store's folder; with a password rather in the environment's "
    "MILLPOND_CATALOG, because every user of the machine can read the list of processes.",
    envvar="MILLPOND_CATALOG",
)
yes_option: Final = flag("--yes", "Do not ask for confirmation.")
