"""Published data sets, against which examples are checked in addition to their own: in ``../shared/data``, next to the
checkout, or in the folder that ``MILLPOND_DATA`` names. No example and no test needs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "MILLPOND_DATA"
"""The environment variable that names another folder of data sets."""

_NEXT_TO_CHECKOUT: Final = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """The folder of the data set ``name``, whether or not it is there."""
    return Path(os.environ.get(VARIABLE) or _NEXT_TO_CHECKOUT) / name


def need(path: Path) -> Path:
    """The path, which has to be there.

    Raises:
        FileNotFoundError: it is not; the message names it.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is not here")
    return path
