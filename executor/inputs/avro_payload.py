"""Payloads in Avro's binary encoding: plain, as single objects, or in Confluent's wire format.

A payload is read with its writer's schema, resolved to the schema that user code expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import orjson

from millpond.executor.inputs.payload import (
    CONFLUENT_HEADER,
    Decoder,
    Payload,
    SchemaLike,
    SchemaLookup,
    SchemasById,
    json_schema_text,
    misfit,
    missing_package,
    read_schema_file,
    schema_id,
)
from millpond.statestore.errors import InvalidError
from millpond.statestore.objects.obstore import file_here

_NAMED: Final = "__named_schemas"
_PARSED: Final = "__fastavro_parsed"
_TEXT_OF_BYTES: Final = frozenset({"bytes", "fixed"})


def parsed_schema(text: str, what: str) -> dict[str, Any]:
    """Return a record's schema, parsed; ``what`` names the schema in errors."""
    import fastavro

    given = orjson.loads(text)
    try:
        parsed = cast(dict[str, Any], fastavro.parse_schema(_without_uuids(given)))
    except Exception as cause:
        # Of a malformed schema the library raises what its code meets: KeyError, TypeError and more.
        raise InvalidError(
            f"{what} is not an Avro schema", reason=f"{type(cause).__name__}: {cause}"
        ) from cause
    if not isinstance(given, dict) or given.get("type") != "record" or "fields" not in given:
        raise InvalidError(f"{what} must describe a record, because values need fields", schema=text[:200])
    _make_defaults(parsed)
    return parsed


def sub_schema(schema: Any, whole: Mapping[str, Any]) -> Any:
    """Return a part of a parsed schema in a form that the library does not parse again; names are resolved."""
    named = whole[_NAMED]
    if isinstance(schema, str) and schema in named:
        schema = named[schema]
    return {**schema, _PARSED: True, _NAMED: named} if isinstance(schema, dict) else schema


def _without_uuids(schema: Any) -> Any:
    """Return the schema with UUIDs as plain text: neither JSON nor a dead letter has a UUID type."""
    if isinstance(schema, list):
        return [_without_uuids(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    is_uuid = schema.get("logicalType") == "uuid"
    return {
        name: part if name == "default" else _without_uuids(part)
        for name, part in schema.items()
        if not (is_uuid and name == "logicalType")
    }


def _make_defaults(parsed: Mapping[str, Any]) -> None:
    """Replace each default with the value that the same bytes would decode to.

    The library fills in the JSON default unchanged, but there bytes are text and a time is a number.
    """
    named = parsed[_NAMED]
    fields = {id(field): field for root in (parsed, *named.values()) for field in _fields_in(root)}
    # Make all before replacing any: a default may contain the default of another field.
    made = [
        (field, _value_of(field["type"], field["default"], named))
        for field in fields.values()
        if "default" in field
    ]
    for field, value in made:
        field["default"] = value


def _fields_in(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, list):
        for branch in schema:
            yield from _fields_in(branch)
    elif isinstance(schema, dict):
        for field in schema.get("fields", ()):
            yield field
            yield from _fields_in(field["type"])
        for inner in ("items", "values", "type"):
            if not isinstance(schema.get(inner), str):
                yield from _fields_in(schema.get(inner))


def _value_of(schema: Any, default: Any, named: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        branch = next((one for one in schema if (one == "null") == (default is None)), schema[0])
        return _value_of(branch, default, named)
    if isinstance(schema, str):
        if schema in named:
            return _value_of(named[schema], default, named)
        return _primitive(schema, default)
    kind = schema["type"]
    if kind == "record":
        return {
            field["name"]: _value_of(field["type"], default.get(field["name"], field.get("default")), named)
            for field in schema["fields"]
        }
    if kind == "array":
        return [_value_of(schema["items"], item, named) for item in default]
    if kind == "map":
        return {name: _value_of(schema["values"], part, named) for name, part in default.items()}
    if not isinstance(kind, str):
        return _value_of(kind, default, named)
    from fastavro.read import LOGICAL_READERS

    plain, read = _primitive(kind, default), LOGICAL_READERS.get(f"{kind}-{schema.get('logicalType')}")
    return plain if read is None else read(plain, schema, schema)


def _primitive(kind: str, default: Any) -> Any:
    if kind in _TEXT_OF_BYTES:
        return default.encode("iso-8859-1")
    return float(default) if kind in {"float", "double"} else default


_Decode: TypeAlias = Callable[..., Any]
# Compiled code has no check of the stack's depth, and a level takes at least a byte. Python's own reader has one.
_BYTES_FOR_COMPILED: Final = 1_000
_TOO_DEEP: Final = "it is nested too deeply"

_ITEMS_MAX: Final = 100_000
"""Greatest number of items of an array or map that are searched for the unreadable one."""


def reader_of(
    writer: dict[str, Any], reader: dict[str, Any], name: str
) -> Callable[[bytes, int], dict[str, Any]]:
    """Return a function of a payload and its header's length that reads values of the reader's schema."""
    from fastavro import schemaless_reader

    # Resolving takes several times as long as reading.
    resolved = None if writer == reader else reader
    is_endless = _is_recursive(writer[_NAMED])

    def read(payload: bytes, start: int) -> dict[str, Any]:
        source = BytesIO(payload)
        source.seek(start)
        decode: _Decode = schemaless_reader
        if is_endless and len(payload) > _BYTES_FOR_COMPILED:
            from fastavro._read_py import schemaless_reader as decode
        try:
            value: Any = decode(source, writer, resolved)
        except RecursionError as error:
            raise misfit(name, _TOO_DEEP) from error
        except Exception as error:
            raise _failure(payload, start, writer, reader, name, error, decode) from error
        if source.tell() != len(payload):
            raise misfit(name, f"{len(payload) - source.tell()} bytes are left after the last field")
        return value  # type: ignore[no-any-return]

    return read


def _is_recursive(named: Mapping[str, Any]) -> bool:
    """Return True if a value of one of the named types may have another one of the same type in it."""
    graph = {
        name: set(_names_in([field["type"] for field in schema.get("fields", ())], named))
        for name, schema in named.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def _names_in(schema: Any, named: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(schema, str):
        if schema in named:
            yield schema
    elif isinstance(schema, list):
        for branch in schema:
            yield from _names_in(branch, named)
    elif isinstance(schema, dict):
        parts = [field["type"] for field in schema.get("fields", ())]
        yield from _names_in([*parts, *(schema.get(inner) for inner in ("name", "items", "values"))], named)
        if not isinstance(schema.get("type"), str) or schema["type"] in named:
            yield from _names_in(schema.get("type"), named)


def _failure(
    payload: bytes,
    start: int,
    writer: dict[str, Any],
    reader: dict[str, Any],
    name: str,
    error: Exception,
    decode: _Decode,
) -> InvalidError:
    source = BytesIO(payload)
    source.seek(start)
    try:
        found = _first_failure(source, writer, writer, "", decode)
    except RecursionError:
        return misfit(name, _TOO_DEEP)
    if found is not None:
        field, cause = found
        if isinstance(cause, EOFError):
            return misfit(name, "the payload ends within it", field)
        kind = type(cause).__name__
        return misfit(name, f"{kind}: {cause}" if str(cause) else kind, field)
    # The writer's schema fits the bytes, so the two schemas do not fit each other.
    for read in reader["fields"]:
        source.seek(start)
        try:
            decode(source, writer, {**reader, "fields": [read]})
        except Exception as failure:  # noqa: BLE001 - as above
            return misfit(name, f"the schemas do not go together: {failure}", read["name"])
    return misfit(name, f"the schemas do not go together: {error}")


def _first_failure(
    source: BytesIO, schema: Any, whole: dict[str, Any], path: str, decode: _Decode
) -> tuple[str, Exception] | None:
    """Return path and reason of the innermost unreadable part; ``None`` leaves the source after the value."""
    begin = source.tell()
    kind = sub_schema(schema, whole)
    try:
        if isinstance(kind, list):
            branch = int(_primitive_in(source, "long"))
            if not 0 <= branch < len(kind):
                raise IndexError(f"it says branch {branch} of a union of {len(kind)}")  # noqa: TRY301
            return _first_failure(source, kind[branch], whole, path, decode)
        decode(source, kind, None)
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        failed: Exception = error
    else:
        return None
    source.seek(begin)
    try:
        for part, inner in _parts(source, kind):
            found = _first_failure(source, inner, whole, f"{path}{part}".removeprefix("."), decode)
            if found is not None:
                return found
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - the number of items, or the name of one
        return path, error
    return path, failed


def _parts(source: BytesIO, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value in order; read each before asking for the next."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "record":
        for field in schema["fields"]:
            yield f".{field['name']}", field["type"]
    elif kind in {"array", "map"}:
        place = 0
        while (count := int(_primitive_in(source, "long"))) != 0 and place < _ITEMS_MAX:
            if count < 0:
                # The size of the block in bytes follows its count.
                _primitive_in(source, "long")
            for _ in range(min(abs(count), _ITEMS_MAX - place)):
                if kind == "map":
                    yield f".{_primitive_in(source, 'string')}", schema["values"]
                else:
                    yield f"[{place}]", schema["items"]
                place += 1


def _primitive_in(source: BytesIO, kind: str) -> Any:
    from fastavro import schemaless_reader

    return schemaless_reader(source, kind, None)


AvroFraming = Literal["plain", "single_object", "confluent"]
"""The bytes before the encoding: none, a fingerprint of the writer's schema, or that schema's number."""

_SINGLE_OBJECT: Final = b"\xc3\x01"
_FINGERPRINT_END: Final = 10
_WHAT: Final = "the Avro schema"


class AvroPayload(Payload):
    """Avro's binary encoding, one record per payload.

    A value written with another schema is resolved to this one by Avro's rules: fields are found by name, new
    fields get their default, dropped fields are skipped, numbers become wider. Needs ``millpond[avro]``.

    Args:
        schema: the schema of the values that code sees: the path of its file, its text, or a ``dict``.
        column: the column with the bytes.
        framing: ``"plain"``: the encoding alone; ``"single_object"``: after the fingerprint of the writer's
            schema; ``"confluent"``: after a zero byte and the four bytes of its number, as in a schema
            registry.
        writer: with ``"plain"``, the schema that wrote the payloads, if it differs.
        schemas: the schemas that wrote the payloads. With ``"confluent"`` by number: a folder with files
            named ``7.avsc``, a mapping, or a function that returns ``None`` or raises a `LookupError` for an
            unknown number. With ``"single_object"``, where ``schema`` itself is always known: a folder of
            ``.avsc`` files, or a list. All workers must be able to reach the folder or call the function.

    Example::

        payload = mp.AvroPayload("payment.avsc", framing="confluent", schemas="schemas/")
        pipeline.inject("payments", key="card", at="paid_at", payload=payload)
    """

    def __init__(
        self,
        schema: SchemaLike,
        *,
        column: str = "value",
        framing: AvroFraming = "plain",
        writer: SchemaLike | None = None,
        schemas: SchemasById | Sequence[SchemaLike] | None = None,
    ) -> None:
        super().__init__(column)
        if framing not in get_args(AvroFraming):
            known = list(get_args(AvroFraming))
            raise InvalidError("unknown framing of Avro", framing=framing, framings=known)
        if writer is not None and framing != "plain":
            raise InvalidError(
                "writer= is for plain payloads only: others name their schema", framing=framing
            )
        if schemas is not None and framing == "plain":
            raise InvalidError("plain payloads name no schema: give the writer's as writer=", framing=framing)
        if schemas is None and framing == "confluent":
            raise InvalidError(
                "payloads of this framing have a schema's number: give schemas=", framing=framing
            )
        self._schema = json_schema_text(schema, _WHAT)
        self._framing = framing
        self._writer = None if writer is None else json_schema_text(writer, "the writer's Avro schema")
        self._schemas = _frozen(framing, schemas)
        self._decoder = self.decoder()

    def __repr__(self) -> str:
        return f"AvroPayload({_name_of(self._schema)!r}, column={self.column!r}, framing={self._framing!r})"

    def fields(self) -> Collection[str]:
        """Return the names of the record's fields."""
        return [field["name"] for field in orjson.loads(self._schema)["fields"]]

    def decoder(self) -> Decoder:
        """Return a function that reads the framing, then the encoding."""
        try:
            import fastavro  # noqa: F401 - whether it is there
        except ImportError as cause:
            raise missing_package(self, "fastavro", "avro") from cause
        reader = parsed_schema(self._schema, _WHAT)
        if self._framing == "plain":
            written = self._schema if self._writer is None else self._writer
            read = reader_of(parsed_schema(written, "the writer's Avro schema"), reader, _name_of(written))
            return lambda payload: read(payload, 0)
        if self._framing == "single_object":
            return _SingleObjects(self._schema, self._schemas, reader).read

        def reader_of_found(schema: Any, what: str) -> Callable[[bytes, int], Any]:
            given, whose = schema.decode() if isinstance(schema, bytes) else schema, f"{what} of the payloads"
            text = json_schema_text(given, whose)
            return reader_of(parsed_schema(text, whose), reader, f"{_name_of(text)} ({what})")

        lookup = SchemaLookup(self._schemas, ".avsc", reader_of_found)
        return lambda payload: lookup.find(schema_id(payload))(payload, CONFLUENT_HEADER)


class _SingleObjects:
    """Reads single objects, whose writers' schemas are known by their fingerprints."""

    def __init__(self, schema: str, schemas: Any, reader: dict[str, Any]) -> None:
        self._reader = reader
        self._folder = schemas if isinstance(schemas, Path) else None
        self._known: dict[bytes, Callable[[bytes, int], dict[str, Any]]] = {}
        self._files: set[Path] = set()
        for text in (schema, *(() if isinstance(schemas, Path) else schemas or ())):
            self._learn(text)

    def read(self, payload: bytes) -> dict[str, Any]:
        if payload[:2] != _SINGLE_OBJECT or len(payload) < _FINGERPRINT_END:
            raise InvalidError(
                "the payload is not a single object of Avro, which begins with c3 01 and eight bytes of a fingerprint",
                begins=payload[:_FINGERPRINT_END].hex(" "),
            )
        fingerprint = payload[2:_FINGERPRINT_END]
        if fingerprint not in self._known and self._folder is not None:
            for path in sorted(set(self._folder.glob("*.avsc")) - self._files):
                self._learn(json_schema_text(read_schema_file(path, _WHAT).decode(), _WHAT))
                self._files.add(path)
        read = self._known.get(fingerprint)
        if read is None:
            raise InvalidError(
                "the payload was written with an unknown schema", fingerprint=fingerprint.hex()
            )
        return read(payload, _FINGERPRINT_END)

    def _learn(self, text: str) -> None:
        from fastavro.schema import fingerprint, to_parsing_canonical_form

        parsed = parsed_schema(text, "a writer's Avro schema")
        canonical = to_parsing_canonical_form(orjson.loads(text))
        self._known[bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))] = reader_of(
            parsed, self._reader, _name_of(text)
        )


def _name_of(text: str) -> str:
    schema = orjson.loads(text)
    return str(schema.get("name", "record")) if isinstance(schema, dict) else "record"


def _frozen(framing: AvroFraming, schemas: Any) -> Any:
    """Return the schemas in a form that cannot change: a folder as an absolute path, a list as texts."""
    if isinstance(schemas, str | Path):
        folder = file_here(schemas).absolute()
        if not folder.is_dir():
            raise InvalidError("the folder of schemas does not exist", path=folder)
        return folder
    if schemas is None or framing == "confluent":
        return dict(schemas) if isinstance(schemas, dict) else schemas
    return tuple(json_schema_text(schema, "a writer's Avro schema") for schema in schemas)
