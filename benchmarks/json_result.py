"""Output of a benchmark: JSON on standard output, and in a file where asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def tell_result(figures: Mapping[str, object], path: Path | None, *, indent: int | None = None) -> None:
    """Print the figures as JSON, and write them to ``path``, whose folder is created.

    Args:
        figures: the figures by name.
        path: the file; ``None`` writes none.
        indent: spaces per level; ``None`` writes one line.
    """
    text = json.dumps(figures, indent=indent)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    print(text)
