"""The names of objects that are written once: no two writers draw the same, so what has such a name never changes."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"(?:^|/)\d{10,}-[0-9a-f]{32}\.parquet$")


def is_written_once(path: str) -> bool:
    """Whether a path is that of a row file that Millpond wrote; other writers' files have other names.

    Example:
        >>> is_written_once(f"computation=c/0000000007-{'ab' * 16}.parquet"), is_written_once("_delta_log/0.json")
        (True, False)
    """
    return _NAME.search(path) is not None
