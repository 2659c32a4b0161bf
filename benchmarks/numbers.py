"""Options with several numbers: ``--intervals 100,1000``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

_Number = TypeVar("_Number", int, float)


def numbers(kind: Callable[[str], _Number]) -> Callable[[click.Context, click.Parameter, str], list[_Number]]:
    """A callback of `click.option`: the numbers of a text with commas between them.

    Args:
        kind: ``int`` or ``float``.
    """

    def read(_context: click.Context, _option: click.Parameter, text: str) -> list[_Number]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise click.BadParameter("give numbers with commas between them") from None

    return read
