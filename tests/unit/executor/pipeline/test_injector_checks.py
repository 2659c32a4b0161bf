from __future__ import annotations

from typing import Any

import pytest

import millpond as mp

_RECORD = {
    "type": "record",
    "name": "R",
    "fields": [{"name": "card", "type": "string"}, {"name": "at", "type": "long"}],
}


def _inject(**arguments: Any) -> object:
    given = {"key": "card", "at": "at", "payload": mp.AvroPayload(_RECORD), **arguments}
    return mp.Pipeline("p").inject("in", **given)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"key": ["card", "at"]},
        {"key": lambda row: row["anything"]},
        {"at": "__row_timestamp", "id": "__row_offset"},
        {"at": mp.IngressTime()},
        {"payload": mp.JsonPayload({}), "key": "anything"},
    ],
)
def test_schema_fields_and_row_columns_are_accepted(arguments: dict[str, Any]) -> None:
    """The check cannot look into functions."""
    assert repr(_inject(**arguments)) == "Stream('in' of 'p')"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"key": "crad"},
            r"the payload's schema has no such field; did you mean 'card'\?.* stream=`in` field=`crad`",
        ),
        (
            {"at": "timestamp"},
            "no such field: columns of the row have __row_ before their names stream=`in` field=`timestamp`",
        ),
        ({"key": ["card", "gone"]}, "field=`gone`"),
        ({"id": "gone"}, "field=`gone`"),
        (
            {"payload": mp.AvroPayload},
            "payload must be an AvroPayload, a ProtobufPayload or a JsonPayload.* type=`AvroPayload`",
        ),
        ({"payload": "value"}, "payload must be .* type=`str`"),
        ({"change": "op"}, "a stream of changes takes no payload"),
    ],
)
def test_unknown_fields_and_invalid_payloads_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(mp.InvalidError, match=message):
        _inject(**arguments)
