"""Payloads of JSON text, checked against a JSON Schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from millpond.executor.inputs.payload import (
    Decoder,
    Payload,
    SchemaLike,
    json_schema_text,
    misfit,
    missing_package,
)
from millpond.statestore.errors import InvalidError


class JsonPayload(Payload):
    """JSON text with a JSON Schema of any draft from 4 to 2020-12.

    ``$schema`` names the draft; the default is the last one. A value has JSON's own types: a date stays text.
    ``format`` is checked, for example ``date-time``. References must lead into the schema itself; none is
    fetched. Needs ``millpond[json-schema]``.

    Args:
        schema: the path of the schema's file, its text, or a ``dict``.
        column: the column with the text, as ``bytes`` or ``str``.

    Raises:
        InvalidError: the schema cannot be read or is invalid, or the package is not installed.

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
        """Return a function that parses a payload and checks it.

        Raises:
            InvalidError: the schema is invalid, or the package is not installed.
        """
        try:
            import jsonschema_rs
        except ImportError as cause:
            raise missing_package(self, "jsonschema-rs", "json-schema") from cause
        try:
            validator = jsonschema_rs.validator_for(self._schema, validate_formats=True, offline=True)
        except (ValueError, jsonschema_rs.ReferencingError) as cause:
            raise InvalidError(
                "the JSON Schema is none", schema=self._name, reason=str(cause).partition("\n")[0]
            ) from cause
        name, is_valid = self._name, validator.is_valid

        def decode(payload: bytes) -> Mapping[str, Any]:
            try:
                value = orjson.loads(payload)
            except orjson.JSONDecodeError as error:
                raise misfit(name, f"it is no JSON: {error}") from error
            if not is_valid(value):
                raise _first_misfit(name, validator, value)
            if not isinstance(value, dict):
                raise misfit(name, f"it is no object with fields, but of type {type(value).__name__}")
            return value

        return decode


def _first_misfit(name: str, validator: Any, value: Any) -> InvalidError:
    error = next(validator.iter_errors(value))
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
    return misfit(name, error.message, path.removeprefix("."))
