from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

import millpond as mp
from tests.payloads import avro_bytes, confluent, single_object

_OLD = {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]}
_NEW = {**_OLD, "fields": [{"name": "n", "type": "long"}, {"name": "note", "type": "string", "default": "-"}]}


def test_payloads_of_one_topic_have_many_schemas() -> None:
    """With a number before it, each payload is read with the schema that it was written with, older or newer."""
    payload = mp.AvroPayload(_OLD, framing="confluent", schemas={1: _OLD, 2: orjson.dumps(_NEW).decode()})

    assert payload.decode(confluent(1, avro_bytes(_OLD, {"n": 5}))) == {"n": 5}
    with pytest.raises(
        mp.InvalidError, match=r"schema=`R \(schema 2\)` field=`n` .*Schema mismatch: long is not int"
    ):
        payload.decode(confluent(2, avro_bytes(_NEW, {"n": 5, "note": "x"})))
    newer = mp.AvroPayload(_NEW, framing="confluent", schemas=[None, _OLD, _NEW].__getitem__)
    assert newer.decode(confluent(1, avro_bytes(_OLD, {"n": 5}))) == {"n": 5, "note": "-"}
    assert newer.decode(confluent(2, avro_bytes(_NEW, {"n": 5, "note": "x"}))) == {"n": 5, "note": "x"}


def test_a_looked_up_schema_may_be_none() -> None:
    """What a lookup brings that is no schema makes the payload unreadable, and the next one is looked up again."""
    found: dict[int, Any] = {1: '{"type":'}
    payload = mp.AvroPayload(_OLD, framing="confluent", schemas=lambda number: found[number])
    encoded = confluent(1, avro_bytes(_OLD, {"n": 5}))

    with pytest.raises(mp.InvalidError, match="schema 1 of the payloads is not JSON"):
        payload.decode(encoded)
    found[1] = _OLD
    assert payload.decode(encoded) == {"n": 5}


def test_single_objects_are_told_by_fingerprints(tmp_path: Path) -> None:
    """Its own schema, those of a list and those of a folder, later ones too, are known by their fingerprints."""
    new, old = single_object(_NEW, {"n": 5, "note": "x"}), single_object(_OLD, {"n": 5})
    listed = mp.AvroPayload(_NEW, framing="single_object", schemas=[_OLD])
    folder = mp.AvroPayload(_NEW, framing="single_object", schemas=tmp_path)

    assert [listed.decode(one) for one in (new, old)] == [{"n": 5, "note": "x"}, {"n": 5, "note": "-"}]
    assert folder.decode(new) == {"n": 5, "note": "x"}
    with pytest.raises(mp.InvalidError, match=f"unknown schema fingerprint=`{old[2:10].hex()}`"):
        folder.decode(old)
    (tmp_path / "old.avsc").write_bytes(orjson.dumps(_OLD))
    assert folder.decode(old) == {"n": 5, "note": "-"}
    with pytest.raises(mp.InvalidError, match=r"not a single object of Avro, .* begins=`c3 01 00`"):
        folder.decode(b"\xc3\x01\x00")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framing": "zipped"}, "unknown framing of Avro framing=`zipped`"),
        ({"framing": "confluent"}, "give schemas="),
        ({"framing": "confluent", "schemas": {}, "writer": _OLD}, "for plain payloads only"),
        ({"schemas": {}}, "plain payloads name no schema"),
        ({"framing": "confluent", "schemas": "gone"}, "the folder of schemas does not exist"),
        ({"writer": "gone.avsc"}, "the writer's Avro schema cannot be read"),
        (
            {"framing": "single_object", "schemas": ['"int"']},
            "a writer's Avro schema must describe a record",
        ),
    ],
)
def test_arguments_go_with_the_framing(options: dict[str, Any], message: str) -> None:
    """What does not fit together is refused where it is declared."""
    with pytest.raises(mp.InvalidError, match=message):
        mp.AvroPayload(_OLD, **options)


def test_a_declaration_says_what_it_is() -> None:
    """It names its schema, and knows its fields."""
    payload = mp.AvroPayload(_NEW)

    assert repr(payload) == "AvroPayload('R', column='value', framing='plain')"
    assert payload.fields() == ["n", "note"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the declaration says what to install."""
    monkeypatch.setitem(sys.modules, "fastavro", None)

    with pytest.raises(mp.InvalidError, match=r"pip install 'millpond\[avro\]'"):
        mp.AvroPayload(_OLD)
