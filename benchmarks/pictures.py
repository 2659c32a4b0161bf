"""How the pictures of benchmarks look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

STYLE: Final[Mapping[str, Any]] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    "figure.facecolor": "white",
}
"""Settings of Matplotlib."""
