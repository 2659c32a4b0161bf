"""Reading Avro's binary encoding: with the schema that it was written with, resolved to the one that code expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final

from millpond.executor.payloads.avro_schema import sub_schema
from millpond.executor.payloads.payload import misfit
from millpond.statestore.errors import InvalidError

_ITEMS_MAX: Final = 100_000
"""So many items of an array or map are looked at to find the one that cannot be read."""


def reader_of(
    writer: dict[str, Any], reader: dict[str, Any], name: str
) -> Callable[[bytes, int], dict[str, Any]]:
    """What reads payloads that were written with one schema as values of another.

    Args:
        writer: the schema that they were written with, parsed.
        reader: the schema of the values, parsed.
        name: the writer's name, for errors.

    Returns:
        A function of the payload and the number of bytes that stand before its encoding.
    """
    from fastavro import schemaless_reader

    # Resolving takes a multiple of the time of reading.
    resolved = None if writer == reader else reader

    def read(payload: bytes, start: int) -> dict[str, Any]:
        source = BytesIO(payload)
        source.seek(start)
        try:
            value: Any = schemaless_reader(source, writer, resolved)
        except Exception as error:
            raise _failure(payload, start, writer, reader, name, error) from error
        if source.tell() != len(payload):
            raise misfit(name, f"{len(payload) - source.tell()} bytes are left after the last field")
        return value  # type: ignore[no-any-return]

    return read


def _failure(
    payload: bytes,
    start: int,
    writer: dict[str, Any],
    reader: dict[str, Any],
    name: str,
    error: Exception,
) -> InvalidError:
    source = BytesIO(payload)
    source.seek(start)
    found = _first_failure(source, writer, writer, "")
    if found is None:
        # It can be read, but not as what code expects.
        field, cause = _unresolved(payload, start, writer, reader) or ("", error)
        return misfit(name, f"the schemas do not go together: {cause}", field)
    field, cause = found
    return misfit(name, _reason(cause), field)


def _unresolved(
    payload: bytes, start: int, writer: dict[str, Any], reader: dict[str, Any]
) -> tuple[str, Exception] | None:
    """The first field of the reader that cannot be made of what the writer wrote, and why."""
    from fastavro import schemaless_reader

    for field in reader["fields"]:
        source = BytesIO(payload)
        source.seek(start)
        try:
            schemaless_reader(source, writer, {**reader, "fields": [field]})
        except Exception as error:  # noqa: BLE001 - as above
            return field["name"], error
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, EOFError):
        return "the payload ends within it"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first_failure(
    source: BytesIO, schema: Any, whole: dict[str, Any], path: str
) -> tuple[str, Exception] | None:
    """The path of the innermost part that cannot be read, and why; ``None`` if all can, and the source is behind it."""
    from fastavro import schemaless_reader

    begin = source.tell()
    kind = sub_schema(schema, whole)
    try:
        if isinstance(kind, list):
            return _first_failure(source, kind[_branch(source, kind)], whole, path)
        schemaless_reader(source, kind, None)
    except Exception as error:  # noqa: BLE001 - as above
        failed: Exception = error
    else:
        return None
    source.seek(begin)
    try:
        for part, inner in _parts(source, kind):
            found = _first_failure(source, inner, whole, f"{path}{part}".removeprefix("."))
            if found is not None:
                return found
    except Exception as error:  # noqa: BLE001 - the number of items, or the name of one
        return path, error
    return path, failed


def _branch(source: BytesIO, union: list[Any]) -> int:
    index = _long(source)
    if not 0 <= index < len(union):
        raise IndexError(f"it says branch {index} of a union of {len(union)}")
    return index


def _parts(source: BytesIO, schema: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value in their order, each of which is to be read before the next one is asked for."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "record":
        for field in schema["fields"]:
            yield f".{field['name']}", field["type"]
    elif kind in {"array", "map"}:
        for place in _places(source):
            named = kind == "map"
            part = f".{_text(source)}" if named else f"[{place}]"
            yield part, schema["values" if named else "items"]


def _places(source: BytesIO) -> Iterator[int]:
    place = 0
    while (count := _long(source)) != 0 and place < _ITEMS_MAX:
        if count < 0:
            count = -count
            _long(source)
        for _ in range(min(count, _ITEMS_MAX - place)):
            yield place
            place += 1


def _long(source: BytesIO) -> int:
    from fastavro import schemaless_reader

    number: Any = schemaless_reader(source, "long", None)
    return int(number)


def _text(source: BytesIO) -> str:
    from fastavro import schemaless_reader

    return str(schemaless_reader(source, "string", None))
