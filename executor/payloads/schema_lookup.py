"""Schemas by the number that a payload begins with, as Confluent's wire format has it: a zero byte, and four of the number.

Nothing here talks to a registry: schemas come from a folder, from a mapping, or from a function of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from millpond.executor.payloads.schema_text import read_schema_file
from millpond.statestore.errors import InvalidError, UnavailableError

CONFLUENT_HEADER: Final = 5
"""How many bytes stand before a payload in Confluent's wire format."""

SchemasById = str | Path | Mapping[int, Any] | Callable[[int], Any]
"""A folder with a file for each number, a mapping, or a function that returns the schema, or ``None``."""


def schema_id(payload: bytes) -> int:
    r"""The number of a payload's schema.

    Example:
        >>> schema_id(b"\x00\x00\x00\x00\x07")
        7

    Raises:
        InvalidError: the payload does not begin as Confluent's wire format does.
    """
    if len(payload) < CONFLUENT_HEADER or payload[0]:
        raise InvalidError(
            "the payload is not in Confluent's wire format: it begins with a zero byte and four bytes of a schema's number",
            begins=payload[:CONFLUENT_HEADER].hex(" "),
        )
    return int.from_bytes(payload[1:CONFLUENT_HEADER], "big")


class SchemaLookup:
    """Finds schemas by their numbers, each once.

    A schema that is not found is looked for again with the next payload that names it, since it may have come meanwhile.

    Args:
        schemas: where they are.
        suffix: what the names of files in a folder end with.
        make: makes of a schema what is kept of it.
    """

    def __init__(self, schemas: SchemasById, suffix: str, make: Callable[[Any, str], Any]) -> None:
        self._schemas = schemas
        self._suffix = suffix
        self._make = make
        self._made: dict[int, Any] = {}

    def find(self, number: int) -> Any:
        """What was made of a schema.

        Raises:
            InvalidError: there is no such schema, or it is none.
            UnavailableError: a function of the user's failed, other than with a `LookupError`.
        """
        made = self._made.get(number)
        if made is None:
            # As many as a topic has had versions: a bound would only slow down what is rightly kept.
            made = self._made[number] = self._make(self._look_up(number), f"schema {number}")
        return made

    def _look_up(self, number: int) -> Any:
        schemas = self._schemas
        if isinstance(schemas, str | Path):
            return self._in_folder(Path(schemas), number)
        try:
            found = schemas(number) if callable(schemas) else schemas.get(number)
        except LookupError as cause:
            raise _unknown(number) from cause
        except Exception as cause:
            raise UnavailableError(
                "a schema could not be looked up", schema_id=number, reason=f"{type(cause).__name__}: {cause}"
            ) from cause
        if found is None:
            raise _unknown(number)
        return found

    def _in_folder(self, folder: Path, number: int) -> bytes:
        path = folder / f"{number}{self._suffix}"
        if not path.is_file():
            raise _unknown(number, folder=folder)
        return read_schema_file(path, "the schema")


def _unknown(number: int, **details: object) -> InvalidError:
    return InvalidError("the payload names a schema that is not known", schema_id=number, **details)
