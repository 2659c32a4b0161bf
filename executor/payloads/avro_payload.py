"""Payloads in Avro's binary encoding: alone, as single objects, or in Confluent's wire format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import orjson

from millpond.executor.payloads.avro_reader import reader_of
from millpond.executor.payloads.avro_schema import parsed_schema
from millpond.executor.payloads.payload import Decoder, Payload, missing_package
from millpond.executor.payloads.schema_lookup import CONFLUENT_HEADER, SchemaLookup, SchemasById, schema_id
from millpond.executor.payloads.schema_text import SchemaLike, json_schema_text, read_schema_file
from millpond.statestore.errors import InvalidError

AvroFraming = Literal["plain", "single_object", "confluent"]
"""What stands before the encoding: nothing, a fingerprint of the writer's schema, or its number."""

_SINGLE_OBJECT: Final = b"\xc3\x01"
_FINGERPRINT_END: Final = 10
_WHAT: Final = "the Avro schema"


class AvroPayload(Payload):
    """Avro's binary encoding, each payload a record.

    What was written with another schema is resolved to this one, as Avro's specification says: fields are found by
    name, new ones get their default, dropped ones are skipped, numbers become wider. Needs ``millpond[avro]``.

    Args:
        schema: the schema of the values that code sees: the path of its file, its text, or a ``dict``.
        column: the column with the bytes.
        framing: ``"plain"``: the encoding alone; ``"single_object"``: with the fingerprint of the writer's schema;
            ``"confluent"``: a zero byte and the four bytes of its number, as in a schema registry.
        writer: with ``"plain"``, the schema that payloads were written with, if it is another one.
        schemas: the schemas that payloads were written with. With ``"confluent"`` by their number: a folder with files
            named ``7.avsc``, a mapping, or a function, which returns ``None`` or raises a `LookupError` for a number
            that it does not know. With ``"single_object"``, where ``schema`` itself is always known: a folder of
            ``.avsc`` files, or a list. A function, and a folder, must be there for all workers.

    Raises:
        InvalidError: a schema cannot be read or is none, an argument does not go with the framing, or the package is
            not installed.

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
        _check_arguments(framing, writer, schemas)
        self._schema = json_schema_text(schema, _WHAT)
        self._framing = framing
        self._writer = None if writer is None else json_schema_text(writer, "the writer's Avro schema")
        self._schemas = _settled(framing, schemas)
        self._decoder = self.decoder()

    def __repr__(self) -> str:
        return f"AvroPayload({_name_of(self._schema)!r}, column={self.column!r}, framing={self._framing!r})"

    def fields(self) -> Collection[str]:
        """The names of the record's fields."""
        return [field["name"] for field in orjson.loads(self._schema)["fields"]]

    def decoder(self) -> Decoder:
        """Make what reads the framing, and then the encoding.

        Raises:
            InvalidError: a schema is none, or the package is not installed.
        """
        try:
            import fastavro  # noqa: F401 - whether it is there
        except ImportError as cause:
            raise missing_package(self, "fastavro", "avro") from cause
        reader = parsed_schema(self._schema, _WHAT)
        if self._framing == "plain":
            written = self._schema if self._writer is None else self._writer
            read = reader_of(parsed_schema(written, "the writer's Avro schema"), reader, _name_of(written))
            return partial(_plain, read)
        if self._framing == "confluent":
            lookup = SchemaLookup(self._schemas, ".avsc", partial(_reader_of_looked_up, reader))
            return partial(_confluent, lookup)
        return _SingleObjects(self._schema, self._schemas, reader).read


def _plain(read: Callable[[bytes, int], dict[str, Any]], payload: bytes) -> dict[str, Any]:
    return read(payload, 0)


def _confluent(lookup: SchemaLookup, payload: bytes) -> dict[str, Any]:
    value: dict[str, Any] = lookup.find(schema_id(payload))(payload, CONFLUENT_HEADER)
    return value


def _reader_of_looked_up(reader: dict[str, Any], schema: Any, what: str) -> Callable[[bytes, int], Any]:
    text = json_schema_text(
        schema.decode() if isinstance(schema, bytes) else schema, f"{what} of the payloads"
    )
    name = f"{_name_of(text)} ({what})"
    return reader_of(parsed_schema(text, f"{what} of the payloads"), reader, name)


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
                "the payload is no single object of Avro: it begins with c3 01 and eight bytes of a fingerprint",
                begins=payload[:_FINGERPRINT_END].hex(" "),
            )
        fingerprint = payload[2:_FINGERPRINT_END]
        if fingerprint not in self._known:
            self._read_folder()
        read = self._known.get(fingerprint)
        if read is None:
            raise InvalidError(
                "the payload was written with a schema that is not known", fingerprint=fingerprint.hex()
            )
        return read(payload, _FINGERPRINT_END)

    def _read_folder(self) -> None:
        if self._folder is None:
            return
        for path in sorted(set(self._folder.glob("*.avsc")) - self._files):
            self._learn(json_schema_text(read_schema_file(path, _WHAT).decode(), _WHAT))
            self._files.add(path)

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


def _check_arguments(framing: object, writer: object, schemas: object) -> None:
    if framing not in get_args(AvroFraming):
        raise InvalidError("no such framing of Avro", framing=framing, framings=list(get_args(AvroFraming)))
    if writer is not None and framing != "plain":
        raise InvalidError(
            "a writer's schema is given for plain payloads: others name theirs", framing=framing
        )
    if schemas is not None and framing == "plain":
        raise InvalidError("plain payloads name no schema: give the writer's as writer=", framing=framing)
    if schemas is None and framing == "confluent":
        raise InvalidError("payloads of this framing have a schema's number: give schemas=", framing=framing)


def _settled(framing: AvroFraming, schemas: Any) -> Any:
    """The schemas so that they do not change: a folder as its path from the root, a list as texts."""
    if isinstance(schemas, str | Path):
        folder = Path(schemas).absolute()
        if not folder.is_dir():
            raise InvalidError("there is no such folder of schemas", path=folder)
        return folder
    if schemas is None or framing == "confluent":
        return dict(schemas) if isinstance(schemas, dict) else schemas
    return tuple(json_schema_text(schema, "a writer's Avro schema") for schema in schemas)
