"""
What a benchmark has found: a line of JSON on the screen, and a file where asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

__all__ = ["tell_result"]


def tell_result(found: Mapping[str, object], path: Path | None, *, indent: int | None = None) -> None:
    """
    Print what was found, and write it to ``path``, whose folder is made.

    Args:
        found: figures by name.
        path: of the file; ``None`` for none.
        indent: spaces a level; ``None`` keeps everything on a line.
    """
    text = json.dumps(found, indent=indent)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    print(text)
