"""Facts in YAML files next to the code, whose texts are tables with one row per line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from examples.streaming102.story import clock_us


def facts(name: str) -> Mapping[str, Any]:
    """All of a file in this folder."""
    path = Path(__file__).with_name(name)
    found: Mapping[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def rows(table: str) -> Iterator[list[str]]:
    """The cells of each row.

    Example:
        >>> list(rows("12:06  early  5  # a comment"))
        [['12:06', 'early', '5']]
    """
    for line in table.splitlines():
        yield line.partition("#")[0].split()


def window_us(text: str) -> tuple[int, int] | None:
    """Start and end of a window; ``None`` for the global one.

    Example:
        >>> window_us("00:00..00:02")
        (0, 120000000)
    """
    if text == "global":
        return None
    start, end = map(clock_us, text.split(".."))
    return start, end
