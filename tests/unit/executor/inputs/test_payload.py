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
    """Words with an equals sign; it counts how often what decodes is made."""

    made = 0

    def decoder(self) -> Any:
        Words.made += 1

        def decode(payload: bytes) -> Any:
            text = payload.decode()
            if "=" not in text:
                return text
            return MappingProxyType(dict([text.split("=")]))

        return decode


def test_what_decodes_is_made_once_and_where_it_is_used() -> None:
    """A declaration makes what decodes at the first payload, and its copies of other tasks have one in common."""
    Words.made = 0
    declared = Words("words")
    assert Words.made == 0

    first, second = (pickle.loads(pickle.dumps(declared)) for _ in range(2))

    assert [one.decode(b"a=1") for one in (first, second, first)] == [{"a": "1"}] * 3
    assert (first, first.column) == (declared, "words")
    assert Words.made == 1


def test_declarations_are_equal_if_they_say_the_same() -> None:
    """Declarations are compared by what they say, and not by what they have made."""
    declared = mp.JsonPayload({"title": "a"})

    assert declared == mp.JsonPayload({"title": "a"}) == copy.deepcopy(declared)
    assert hash(declared) == hash(mp.JsonPayload({"title": "a"}))
    assert declared != mp.JsonPayload({"title": "b"})
    assert declared != mp.JsonPayload({"title": "a"}, column="other")
    assert declared != Words()


def test_a_value_is_a_dict() -> None:
    """A mapping is made a ``dict``, and what has no fields is refused."""
    value = Words().decode(b"a=1")

    assert type(value) is dict
    with pytest.raises(mp.InvalidError, match="must be an object with fields type=`str`"):
        Words().decode(b"a")


@pytest.mark.parametrize("column", ["", None, 3])
def test_a_column_has_a_name(column: Any) -> None:
    """A column that is no name is refused at once."""
    with pytest.raises(mp.InvalidError, match="the column of a payload must be a name"):
        Words(column)


def test_reasons_are_one_line_of_bounded_length() -> None:
    """A reason is cut, has no line breaks, and says something even if the cause says nothing."""
    long = misfit("S", "x\n" * 1_000, "a.b")

    assert str(long).startswith("the payload does not fit its schema schema=`S` field=`a.b` reason=`x x ")
    assert len(str(long)) < 400
    assert "\n" not in str(long)
    assert str(misfit("S", EOFError())) == "the payload does not fit its schema schema=`S` reason=`EOFError`"


def test_a_function_of_the_program_travels_with_it() -> None:
    """A declaration with a function that only this process knows by name can be sent to another one."""
    known: Mapping[int, Any] = {1: {"type": "record", "name": "R", "fields": [{"name": "n", "type": "int"}]}}
    declared = mp.AvroPayload(known[1], framing="confluent", schemas=lambda number: known[number])

    arrived = pickle.loads(cloudpickle.dumps(declared))

    assert arrived.decode(b"\x00\x00\x00\x00\x01\x02") == {"n": 1}
