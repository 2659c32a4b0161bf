"""Names of columns that the engine adds to an input, and that no input may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millpond.statestore.errors import InvalidError

ENGINE_PREFIX: Final = "__millpond_"
"""Prefix of the columns that the Spark runner adds to an input's own."""


def refuse_reserved(names: Iterable[object], prefix: str = ENGINE_PREFIX) -> None:
    for name in names:
        # Spark resolves names without regard to case.
        if isinstance(name, str) and name.lower().startswith(prefix):
            raise InvalidError(
                f"names that begin with {prefix} are reserved for Millpond's own columns: rename the input's column",
                column=name,
            )
