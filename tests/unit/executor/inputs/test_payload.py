from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import cloudpickle
import pytest

import millpond as mp
from millpond.executor.inputs.payload import misfit


class Words(mp.types.Payload):
    """Words with an equals sign; count how often a decoder is created."""

    made = 0

    def decoder(self) -> Any:
        Words.made += 1

        def decode(payload: bytes) -> Any:
            text = payload.decode()
            if "=" not in text:
                return text
            return MappingProxyType(dict([text.split("=")]))

        return decode


def test_decoder_is_created_once_at_the_first_payload() -> None:
    """Unpickled copies in one process share a decoder."""
    Words.made = 0
    declared = Words("words")
    assert Words.made == 0

    first, second = (pickle.loads(pickle.dumps(declared)) for _ in range(2))

    assert [one.decode(b"a=1") for one in (first, second, first)] == [{"a": "1"}] * 3
    assert (first, first.column) == (declared, "words")
    assert Words.made == 1


def test_payloads_compare_by_their_arguments() -> None:
    declared = mp.JsonPayload({"title": "a"})

    assert declared == mp.JsonPayload({"title": "a"}) == copy.deepcopy(declared)
    assert hash(declared) == hash(mp.JsonPayload({"title": "a"}))
    assert declared != mp.JsonPayload({"title": "b"})
    assert declared != mp.JsonPayload({"title": "a"}, column="other")
    assert declared != Words()


def test_decoded_mapping_becomes_a_dict() -> None:
    """A value without fields is refused."""
    value = Words().decode(b"a=1")

    assert type(value) is dict
    with pytest.raises(mp.InvalidError, match="must be an object with fields type=`str`"):
        Words().decode(b"a")


@pytest.mark.parametrize("column", ["", None, 3])
def test_column_must_be_a_non_empty_name(column: Any) -> None:
    with pytest.raises(mp.InvalidError, match="the column of a payload must be a name"):
        Words(column)


def test_reason_is_one_line_of_bounded_length() -> None:
    """An exception without a message is named by its class."""
    long = misfit("S", "x\n" * 1_000, "a.b")

    assert str(long).startswith("the payload does not fit its schema schema=`S` field=`a.b` reason=`x x ")
    assert len(str(long)) < 400
    assert "\n" not in str(long)
    assert str(misfit("S", EOFError())) == "the payload does not fit its schema schema=`S` reason=`EOFError`"


def test_payload_with_a_local_function_can_be_pickled_by_cloudpickle() -> None:
    known: Mapping[int, Any] = {1: {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]}}
    declared = mp.AvroPayload(known[1], framing="confluent", schemas=lambda number: known[number])

    arrived = pickle.loads(cloudpickle.dumps(declared))

    assert arrived.decode(b"\x00\x00\x00\x00\x01\x02") == {"n": 1}
