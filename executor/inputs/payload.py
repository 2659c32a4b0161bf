"""Payloads: encoded values in a column of a stream's rows, their schemas, and rows with the payload decoded.

A declaration is small (a schema's text, a message's name) and travels to workers; each process makes the
decoder once. Schemas come from a folder, a mapping or a user's function; nothing here talks to a registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import cloudpickle
import orjson
import pyarrow as pa

from millpond.executor.computation.values import UNHELD, refuse_inexact, unheld
from millpond.executor.inputs.record_size import error_of_size
from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError, did_you_mean
from millpond.statestore.objects.obstore import file_here

Decoder = Callable[[bytes], Mapping[str, Any]]
"""Decodes the bytes of a payload to a mapping of fields; its exceptions are the reasons of dead letters."""

_MADE: Final = frozenset({"_decoder", "_pickled"})
_REASON_MAX: Final = 300


class Payload(ABC):
    """The base class of payloads: encoded values, bytes or text, in a ``column`` of a stream's rows.

    `AvroPayload`, `ProtobufPayload` and `JsonPayload` are ready to use. For another encoding write a subclass
    with a `decoder`.

    Example::

        class MessagePack(mp.types.Payload):
            def decoder(self):
                import msgpack
                return msgpack.unpackb

        pipeline.inject("payments", key="card", at="paid_at", payload=MessagePack("value"))
    """

    def __init__(self, column: str = "value") -> None:
        if not (isinstance(column, str) and column):
            raise InvalidError(
                "the column of a payload must be a name", payload=type(self).__name__, column=column
            )
        self.column: str = column
        self._decoder: Decoder | None = None
        self._pickled: bytes | None = None

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return a function that decodes a payload's bytes to a mapping of fields.

        It is called once in each process that decodes. An exception from the function becomes the reason of a
        dead letter, except an `UnavailableError`, which ends the run.
        """

    def fields(self) -> Collection[str] | None:
        """Return the names that a value's fields can have; ``None`` if the declaration leaves them open."""
        return None

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Decode a payload to the fields of its value.

        Raises:
            InvalidError: the payload cannot be decoded; the error names schema, field and reason.
            UnavailableError: a schema could not be looked up.
        """
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = self.decoder()
        value = decoder(payload)
        if type(value) is dict:
            return value
        if not isinstance(value, Mapping):
            raise InvalidError("the payload must be an object with fields", type=type(value).__name__)
        return dict(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._declared() == other._declared()

    def __hash__(self) -> int:
        return hash((type(self), self.column))

    def _declared(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the declaration; a process that unpickles it again gets the first object, with its decoder."""
        # Once per object: equal bytes find the same object, with its decoder, in the cache of the other process.
        if self._pickled is None:
            self._pickled = cloudpickle.dumps((type(self), self._declared()))
        return _restored, (self._pickled,)


@lru_cache(maxsize=64)
def _restored(pickled: bytes) -> Payload:
    kind, declared = cloudpickle.loads(pickled)  # a part of what is being unpickled
    payload: Payload = kind.__new__(kind)
    vars(payload).update(declared, _decoder=None, _pickled=pickled)
    return payload


def misfit(schema: str, reason: object, field: str = "") -> InvalidError:
    """Return the error of a payload that cannot be decoded; a long reason is cut."""
    text = " ".join(str(reason).split()) or type(reason).__name__
    return InvalidError(
        "the payload does not fit its schema",
        schema=schema,
        **({"field": field} if field else {}),
        reason=text if len(text) <= _REASON_MAX else f"{text[:_REASON_MAX]}…",
    )


def missing_package(payload: Payload, package: str, extra: str) -> InvalidError:
    return InvalidError(f"{type(payload).__name__} needs {package}: pip install 'millpond[{extra}]'")


SchemaLike = str | Path | Mapping[str, Any] | list[Any]
"""A schema in JSON: the path of a file, its text, or the parsed JSON."""

_BEGINNINGS: Final = ("{", "[", '"')


def json_schema_text(schema: SchemaLike, what: str) -> str:
    """Return a schema as JSON text; its first character distinguishes text from a path."""
    if isinstance(schema, Path) or (isinstance(schema, str) and not schema.lstrip().startswith(_BEGINNINGS)):
        text = read_schema_file(file_here(schema), what)
    elif isinstance(schema, str):
        text = schema.encode()
    else:
        try:
            text = orjson.dumps(schema)
        except TypeError as cause:
            raise InvalidError(
                f"{what} must be the path of a file, text, or parsed JSON",
                type=type(schema).__name__,
                reason=cause,
            ) from cause
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise InvalidError(f"{what} is not JSON", schema=str(schema)[:200], reason=cause) from cause
    return text.decode()


def read_schema_file(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise InvalidError(f"{what} cannot be read", path=path, reason=cause.strerror or cause) from cause


class JsonPayload(Payload):
    """JSON text with a JSON Schema of any draft from 4 to 2020-12.

    The schema is the path of its file, its text, or a ``dict``; the column has ``bytes`` or ``str``. ``$schema``
    names the draft; the default is the last one. A value has JSON's own types: a date stays text. ``format`` is
    checked, for example ``date-time``. References must lead into the schema itself; none is fetched. Needs
    ``millpond[json-schema]``.

    Example::

        pipeline.inject("payments", key="card", at="paid_at", payload=mp.JsonPayload("payment.schema.json"))
    """

    def __init__(self, schema: SchemaLike, *, column: str = "value") -> None:
        super().__init__(column)
        self._schema = json_schema_text(schema, "the JSON Schema")
        self._decoder = self.decoder()

    def __repr__(self) -> str:
        return f"JsonPayload({self._name!r}, column={self.column!r})"

    @property
    def _name(self) -> str:
        schema = orjson.loads(self._schema)
        members = schema if isinstance(schema, Mapping) else {}
        return str(members.get("title") or members.get("$id") or "JSON Schema")

    def fields(self) -> Collection[str] | None:
        """Return the names of the properties, or ``None`` if the schema allows others."""
        schema = orjson.loads(self._schema)
        is_closed = isinstance(schema, dict) and schema.get("additionalProperties") is False
        if not is_closed or not {"$ref", "patternProperties"}.isdisjoint(schema):
            return None
        return list(schema.get("properties", ()))

    def decoder(self) -> Decoder:
        """Return a function that parses a payload and checks it."""
        try:
            import jsonschema_rs
        except ImportError as cause:
            raise missing_package(self, "jsonschema-rs", "json-schema") from cause
        try:
            validator = jsonschema_rs.validator_for(self._schema, validate_formats=True, offline=True)
        except (ValueError, jsonschema_rs.ReferencingError) as cause:
            raise InvalidError(
                "the JSON Schema is invalid", schema=self._name, reason=str(cause).partition("\n")[0]
            ) from cause
        name, is_valid = self._name, validator.is_valid

        def decode(payload: bytes) -> Mapping[str, Any]:
            try:
                value = orjson.loads(payload)
            except orjson.JSONDecodeError as error:
                raise misfit(name, f"it is not JSON: {error}") from error
            if not is_valid(value):
                unfit = next(validator.iter_errors(value))
                path = "".join(
                    f"[{part}]" if isinstance(part, int) else f".{part}" for part in unfit.instance_path
                )
                raise misfit(name, unfit.message, path.removeprefix("."))
            if not isinstance(value, dict):
                raise misfit(name, f"it must be an object with fields, got {type(value).__name__}")
            return value

        return decode


CONFLUENT_HEADER: Final = 5
"""Length in bytes of the header in Confluent's wire format: a zero byte, and four of the schema's number."""

SchemasById = str | Path | Mapping[int, Any] | Callable[[int], Any]
"""Schemas by number: a folder with a file for each, a mapping, or a function that returns the schema or ``None``."""


def schema_id(payload: bytes) -> int:
    if len(payload) < CONFLUENT_HEADER or payload[0]:
        raise InvalidError(
            "the payload is not in Confluent's wire format, which begins with a zero byte and four bytes of a schema's number",
            begins=payload[:CONFLUENT_HEADER].hex(" "),
        )
    return int.from_bytes(payload[1:CONFLUENT_HEADER], "big")


class SchemaLookup:
    """Finds schemas by number and keeps the result of ``make`` for each.

    An unknown schema is looked up again with the next payload, because it may have appeared meanwhile.
    """

    def __init__(self, schemas: SchemasById, suffix: str, make: Callable[[Any, str], Any]) -> None:
        self._schemas = schemas
        self._suffix = suffix
        self._make = make
        self._made: dict[int, Any] = {}

    def find(self, number: int) -> Any:
        made = self._made.get(number)
        if made is None:
            # Unbounded, because there are only as many schemas as the topic has had versions.
            made = self._made[number] = self._make(self._look_up(number), f"schema {number}")
        return made

    def _look_up(self, number: int) -> Any:
        schemas = self._schemas
        if isinstance(schemas, str | Path):
            folder = file_here(schemas)
            path = folder / f"{number}{self._suffix}"
            if not path.is_file():
                raise _unknown(number, folder=folder)
            return read_schema_file(path, "the schema")
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


def _unknown(number: int, **details: object) -> InvalidError:
    return InvalidError("the payload names an unknown schema", schema_id=number, **details)


ROW_PREFIX: Final = "__row_"
"""Prefix of a column next to the payload."""

_FIRST_ROWS: Final = 1_000


class DecodedRow(dict[str, Any]):
    """A row as an injector sees it: the fields of its value, and the other columns with `ROW_PREFIX`.

    ``row`` is the original row, kept for dead letters so that it can be decoded again; ``value`` is the
    record's value, with the fields alone.
    """

    __slots__ = ("row", "value")

    row: Mapping[str, Any]
    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UndecodedRow:
    row: Any
    reason: str


def python_rows(rows: pa.Table) -> list[Any]:
    """Return the rows of a table as mappings; a row with a value that Python cannot hold as an `UndecodedRow`."""
    try:
        return _rows_held(rows)
    except UNHELD:
        return [_python_row(rows.take(pa.array([place]))) for place in range(rows.num_rows)]


def _python_row(row: pa.Table) -> Any:
    try:
        return _rows_held(row)[0]
    except UNHELD as error:
        return UndecodedRow(None, str(unheld(error)))


def _rows_held(rows: pa.Table) -> list[Any]:
    for column in rows.columns:
        refuse_inexact(column)
    found: list[Any] = rows.to_pylist(maps_as_pydicts="strict")
    return found


TEXT_TYPES: Final = frozenset({pa.string(), pa.large_string(), pa.string_view(), pa.null()})
"""Arrow's types of text, and of a column of nulls alone."""

_ENCODED_TYPES: Final = TEXT_TYPES | {pa.binary(), pa.large_binary(), pa.binary_view()}

ROW_DICTS: Final[frozenset[Any]] = frozenset((dict, DecodedRow))
"""Types of rows whose fields are read column by column."""


def decoded_rows(payload: Payload, rows: Any, *, stream: str, max_bytes: int | None = None) -> list[Any]:
    if isinstance(rows, pa.Table):
        return list(_of_table(payload, rows, stream, max_bytes))
    mappings = [row for row in rows[:_FIRST_ROWS] if isinstance(row, Mapping)]
    if mappings and not any(payload.column in row for row in mappings):
        check_payload_column(payload, [*mappings[0]], stream=stream)
    return [_of_mapping(payload, row, max_bytes) for row in rows]


def decoded_values(payload: Payload, rows: Any, *, stream: str) -> list[dict[str, Any]]:
    """Return the values of rows whose payload another process has decoded before."""
    decoded = decoded_rows(payload, rows, stream=stream)
    for row in decoded:
        if isinstance(row, UndecodedRow):
            raise InvalidError(
                "a payload was decoded for its key but cannot be decoded again: a decoder must give the same fields for the "
                "same bytes",
                stream=stream,
                reason=row.reason,
            )
    return [row.value for row in decoded]


def check_payload_column(payload: Payload, columns: Sequence[str], *, stream: str) -> None:
    if payload.column not in columns:
        raise InvalidError(
            f"the input has no such payload column{did_you_mean(payload.column, columns)}",
            stream=stream,
            column=payload.column,
            columns=list(columns),
        )


def reason_of_text(row: Any) -> dict[str, str]:
    """Return why a row that is the text of an object, such as a line of a file, is no JSON; nothing for other rows."""
    if not isinstance(row, str) or not row.lstrip().startswith("{"):
        return {}
    try:
        orjson.loads(row)
    except orjson.JSONDecodeError as error:
        return {"reason": f"it is no JSON: {error}"}
    return {}


def original_row(row: Any) -> Any:
    return row.row if isinstance(row, DecodedRow | UndecodedRow) else row


def value_of_row(row: Any) -> Any:
    return row.value if isinstance(row, DecodedRow) else None


def _of_table(
    payload: Payload, rows: pa.Table, stream: str, max_bytes: int | None
) -> Iterator[DecodedRow | UndecodedRow]:
    check_payload_column(payload, rows.column_names, stream=stream)
    kind = rows.schema.field(payload.column).type
    stored = kind.value_type if pa.types.is_dictionary(kind) else kind
    if stored not in _ENCODED_TYPES and not pa.types.is_fixed_size_binary(stored):
        raise InvalidError(
            "the payload column is neither binary nor text", stream=stream, column=payload.column, type=kind
        )
    others = [(name, ROW_PREFIX + name) for name in rows.column_names if name != payload.column]
    for row in python_rows(rows):
        if isinstance(row, UndecodedRow):
            yield row
        else:
            yield _decoded(payload, row, row[payload.column], others, max_bytes)


def _of_mapping(payload: Payload, row: Any, max_bytes: int | None) -> DecodedRow | UndecodedRow:
    if isinstance(row, UndecodedRow):
        return row
    if not isinstance(row, Mapping):
        return UndecodedRow(row, str(InvalidError("the row has no fields", type=type(row).__name__)))
    if payload.column not in row:
        return UndecodedRow(row, str(InvalidError("the row has no such field", field=payload.column)))
    others = [(name, ROW_PREFIX + str(name)) for name in row if name != payload.column]
    return _decoded(payload, row, row[payload.column], others, max_bytes)


def _decoded(
    payload: Payload,
    row: Mapping[str, Any],
    cell: Any,
    others: Sequence[tuple[str, str]],
    max_bytes: int | None,
) -> DecodedRow | UndecodedRow:
    try:
        encoded = _bytes_of(cell)
        if max_bytes is not None and len(encoded) > max_bytes:
            return UndecodedRow(row, error_of_size(max_bytes))
        value = payload.decode(encoded)
    except UnavailableError:
        raise
    except MillpondError as error:
        return UndecodedRow(row, str(error))
    except Exception as error:  # noqa: BLE001 - what decodes may be the user's, and raise anything
        return UndecodedRow(row, f"the payload cannot be decoded: {type(error).__name__}: {error}")
    decoded = DecodedRow(value)
    decoded.row, decoded.value = row, value
    for name, known_as in others:
        decoded[known_as] = row[name]
    return decoded


def _bytes_of(cell: Any) -> bytes:
    if type(cell) is bytes:
        return cell
    if isinstance(cell, str):
        return cell.encode()
    if isinstance(cell, bytes | bytearray | memoryview):
        return bytes(cell)
    if cell is None:
        raise InvalidError("the payload is null")
    raise InvalidError("the payload is neither bytes nor text", type=type(cell).__name__)
