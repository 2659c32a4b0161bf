"""
Where the public data lies that examples run on: beside the checkout, in ``../shared/data``, or where
``MILLPOND_DATA`` says. None of it is part of this repository.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["VARIABLE", "need", "shared_data"]

VARIABLE: Final = "MILLPOND_DATA"
"""The environment variable that names another folder of data sets."""

_BESIDE_THE_CHECKOUT: Final = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """
    The folder of the data set ``name``, whether or not it is there.
    """
    return Path(os.environ.get(VARIABLE) or _BESIDE_THE_CHECKOUT) / name


def need(path: Path) -> Path:
    """
    The path, which has to be there.

    Raises:
        FileNotFoundError: it is not; the message says where data is looked for.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is not here: public data is looked for beside the checkout, in ../shared/data, "
            f"or in the folder that the environment variable {VARIABLE} names"
        )
    return path
