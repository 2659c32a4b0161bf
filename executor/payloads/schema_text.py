"""Schemas as users give them: a file, its text, or what JSON makes of that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from millpond.statestore.errors import InvalidError

SchemaLike = str | Path | Mapping[str, Any] | list[Any]
"""A schema in JSON: the path of a file, its text, or the objects of that."""

_BEGINNINGS: Final = ("{", "[", '"')


def json_schema_text(schema: SchemaLike, what: str) -> str:
    """A schema as the text of JSON.

    Args:
        schema: as it was given; text is told from a path by its first character.
        what: what it is, for the error.

    Raises:
        InvalidError: there is no such file, or it is no JSON.
    """
    if isinstance(schema, Path) or (isinstance(schema, str) and not schema.lstrip().startswith(_BEGINNINGS)):
        text = read_schema_file(Path(schema), what)
    elif isinstance(schema, str):
        text = schema.encode()
    else:
        text = _written(schema, what)
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise InvalidError(f"{what} is no JSON", schema=str(schema)[:200], reason=cause) from cause
    return text.decode()


def _written(schema: Any, what: str) -> bytes:
    try:
        return orjson.dumps(schema)
    except TypeError as cause:
        raise InvalidError(
            f"{what} is the path of a file, text, or what JSON makes of it",
            type=type(schema).__name__,
            reason=cause,
        ) from cause


def read_schema_file(path: Path, what: str) -> bytes:
    """The bytes of a schema's file.

    Raises:
        InvalidError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as cause:
        raise InvalidError(f"{what} cannot be read", path=path, reason=cause.strerror or cause) from cause
