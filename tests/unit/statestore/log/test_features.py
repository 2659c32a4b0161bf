"""What a table's protocol and metadata ask of readers and writers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Metadata, Protocol
from millpond.statestore.log.features import Use, unmet_duties


def table(*fields: dict[str, Any], **configuration: str) -> Metadata:
    schema = orjson.dumps({"type": "struct", "fields": fields}).decode()
    return Metadata(table_id="t", name=None, schema_string=schema, configuration=configuration)


def column(kind: Any, **rules: str) -> dict[str, Any]:
    return {"name": "c", "type": kind, "nullable": True, "metadata": rules}


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "struct", "fields": [column("long", **{"delta.invariants": "{}"})]},
        {
            "type": "array",
            "elementType": {"type": "struct", "fields": [column("long", **{"delta.invariants": "{}"})]},
        },
        {
            "type": "map",
            "keyType": "string",
            "valueType": {"fields": [column("long", **{"delta.invariants": "{}"})]},
        },
    ],
)
def test_rule_of_a_nested_field_is_found(kind: Any) -> None:
    (duty,) = unmet_duties(Protocol(), table(column(kind)))

    assert (duty.use, duty.feature, duty.by) == (Use.APPEND, "invariants", "c")


def test_features_that_nothing_uses_ask_nothing() -> None:
    listed = (
        "appendOnly",
        "invariants",
        "checkConstraints",
        "changeDataFeed",
        "generatedColumns",
        "identityColumns",
    )
    for protocol in (
        *(Protocol(min_writer_version=version) for version in range(1, 7)),
        Protocol(min_writer_version=7, writer_features=listed),
    ):
        assert unmet_duties(protocol, table(column("long"), **{"delta.appendOnly": "false"})) == ()


def test_duties_of_readers_come_first() -> None:
    metadata = table(column("long"), **{"delta.appendOnly": "true", "delta.constraints.c": "c > 0"})
    protocol = Protocol(
        min_reader_version=3,
        min_writer_version=7,
        reader_features=("deletionVectors",),
        writer_features=("rowTracking", "deletionVectors"),
    )

    duties = unmet_duties(protocol, metadata)
    assert [duty.feature for duty in duties] == [
        "deletionVectors",
        "rowTracking",
        "checkConstraints",
        "appendOnly",
    ]
    assert [duty.use for duty in duties] == [Use.READ, Use.APPEND, Use.APPEND, Use.REWRITE]


@pytest.mark.parametrize("text", ["[", '{"fields":7}', '{"fields":[7]}', '{"fields":[{"metadata":7}]}'])
def test_schema_that_cannot_be_read_is_damage(text: str) -> None:
    with pytest.raises(DataError, match="the table's schema cannot be read"):
        unmet_duties(Protocol(), Metadata(table_id="t", name=None, schema_string=text))
