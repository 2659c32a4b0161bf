"""Names of columns that no input may have: those that the engine adds, and those that it has already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import pyarrow as pa

from millpond.statestore.errors import InvalidError

ENGINE_PREFIX: Final = "__millpond_"
"""Prefix of the columns that the Spark runner adds to an input's own."""


def refuse_repeated(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidError(
                "two columns of the input have one name, so one of them would be lost: rename it", column=name
            )


def refuse_repeated_fields(fields: Iterable[pa.Field], within: str = "") -> None:
    """Refuse columns of one name, and fields of one name in a struct, wherever it stands."""
    known = list(fields)
    refuse_repeated([f"{within}{field.name}" for field in known])
    for field in known:
        parts = [field.type.field(place) for place in range(field.type.num_fields)]
        for together in [parts] if pa.types.is_struct(field.type) else [[part] for part in parts]:
            refuse_repeated_fields(together, f"{within}{field.name}.")


def refuse_reserved(names: Iterable[object], prefix: str = ENGINE_PREFIX) -> None:
    for name in names:
        # Spark resolves names without regard to case.
        if isinstance(name, str) and name.lower().startswith(prefix):
            raise InvalidError(
                f"names that begin with {prefix} are reserved for Millpond's own columns: rename the input's column",
                column=name,
            )
