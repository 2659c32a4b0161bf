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


def test_confluent_payloads_are_read_with_their_writers_schema() -> None:
    """The number before a payload names the schema, older or newer than the reader's."""
    payload = mp.AvroPayload(_OLD, framing="confluent", schemas={1: _OLD, 2: orjson.dumps(_NEW).decode()})

    assert payload.decode(confluent(1, avro_bytes(_OLD, {"n": 5}))) == {"n": 5}
    with pytest.raises(
        mp.InvalidError, match=r"schema=`R \(schema 2\)` field=`n` .*Schema mismatch: long is not int"
    ):
        payload.decode(confluent(2, avro_bytes(_NEW, {"n": 5, "note": "x"})))
    newer = mp.AvroPayload(_NEW, framing="confluent", schemas=[None, _OLD, _NEW].__getitem__)
    assert newer.decode(confluent(1, avro_bytes(_OLD, {"n": 5}))) == {"n": 5, "note": "-"}
    assert newer.decode(confluent(2, avro_bytes(_NEW, {"n": 5, "note": "x"}))) == {"n": 5, "note": "x"}


def test_invalid_looked_up_schema_is_looked_up_again() -> None:
    """A registry may be corrected while the pipeline runs."""
    found: dict[int, Any] = {1: '{"type":'}
    payload = mp.AvroPayload(_OLD, framing="confluent", schemas=lambda number: found[number])
    encoded = confluent(1, avro_bytes(_OLD, {"n": 5}))

    with pytest.raises(mp.InvalidError, match="schema 1 of the payloads is not JSON"):
        payload.decode(encoded)
    found[1] = _OLD
    assert payload.decode(encoded) == {"n": 5}


def test_single_objects_are_identified_by_fingerprint(tmp_path: Path) -> None:
    """A schema may be added to the folder at any time."""
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
def test_arguments_that_contradict_the_framing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(mp.InvalidError, match=message):
        mp.AvroPayload(_OLD, **options)


def test_payload_knows_its_schema_and_fields() -> None:
    payload = mp.AvroPayload(_NEW)

    assert repr(payload) == "AvroPayload('R', column='value', framing='plain')"
    assert payload.fields() == ["n", "note"]


def test_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)

    with pytest.raises(mp.InvalidError, match=r"pip install 'millpond\[avro\]'"):
        mp.AvroPayload(_OLD)
