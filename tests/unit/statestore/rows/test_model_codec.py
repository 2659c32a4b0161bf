"""States of declared classes."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import attrs
import cloudpickle
import msgspec
import pydantic
import pytest

import millpond as mp


@dataclass
class Trip:
    port: str
    at: datetime | None = None


@dataclass
class Ship:
    tons: int = 0
    load: float = 0.0
    trips: list[Trip] = field(default_factory=list)
    flags: tuple[str, ...] = ()


@dataclass
class Tanker(Ship):
    oil: int = 0


class Handmade:
    def __init__(self, tons: int) -> None:
        self.tons = tons

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handmade) and other.tons == self.tons

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def model_dump_json(self) -> str:
        return json.dumps({"tons": self.tons})

    @staticmethod
    def model_validate_json(text: str) -> Handmade:
        tons = json.loads(text)["tons"]
        if not isinstance(tons, int):
            raise _HandmadeError
        return Handmade(tons)


class _HandmadeError(ValueError):
    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": ("trips", 0, "tons"), "msg": "not a number"}]


def test_pydantic_methods_need_no_msgspec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    codec = mp.ModelCodec(Handmade)

    assert codec.decode(codec.encode(Handmade(3))) == Handmade(3)
    assert codec.encode(Handmade(3)) == '{"tons": 3}'
    with pytest.raises(mp.DataError, match=r"field=.trips\[0\].tons. reason=.not a number"):
        codec.decode('{"tons": "x"}')
    with pytest.raises(mp.InvalidError, match=r"field=.trips\[0\].tons."):
        codec.encode(Handmade("x"))  # type: ignore[arg-type]  # what is refused


def test_missing_msgspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(mp.InvalidError, match=r"pip install 'millpond\[models\]'"):
        mp.ModelCodec(Ship)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (int, "a model must be a dataclass"),
        (dict, "a model must be a dataclass"),
        (Ship(), "needs a class, got an instance of `Ship`"),
        ("Ship", "needs a class, got an instance of `str`"),
    ],
)
def test_class_without_declared_fields_is_refused(model: Any, says: str) -> None:
    with pytest.raises(mp.InvalidError, match=says):
        mp.ModelCodec(model)


class TestDataclasses:
    def test_objects_round_trip_as_json(self) -> None:
        codec = mp.ModelCodec(Ship)
        ship = Ship(3, 0.5, [Trip("Rotterdam", datetime(2026, 1, 2, tzinfo=UTC)), Trip("Oslo")], ("NL",))
        text = codec.encode(ship)

        assert codec.decode(text) == ship
        assert json.loads(text)["trips"][0] == {"port": "Rotterdam", "at": "2026-01-02T00:00:00Z"}

    def test_model_codec_is_picklable(self) -> None:
        codec = pickle.loads(pickle.dumps(mp.ModelCodec(Ship)))

        assert codec.decode(codec.encode(Ship(4))) == Ship(4)
        assert repr(codec) == "ModelCodec(Ship)"

    @pytest.mark.parametrize(
        ("ship", "field_name"),
        [
            (Ship(tons="3"), "tons"),  # type: ignore[arg-type]
            (Ship(trips=[Trip("a"), Trip(2)]), r"trips\[1\].port"),  # type: ignore[arg-type]
            (Ship(load=float("nan")), "load"),
            (Ship(flags=["a"]), "flags"),  # type: ignore[arg-type]
        ],
    )
    def test_value_that_would_change_names_field(self, ship: Ship, field_name: str) -> None:
        with pytest.raises(mp.InvalidError, match=rf"model=.Ship.*field=.{field_name}. reason"):
            mp.ModelCodec(Ship).encode(ship)

    @pytest.mark.parametrize("value", [{"tons": 3}, None, Trip("a"), Tanker()])
    def test_object_of_other_class_is_refused(self, value: object) -> None:
        with pytest.raises(mp.InvalidError, match="does not fit its model"):
            mp.ModelCodec(Ship).encode(value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{"tons":"x"}', "field=.tons."),
            ('{"trips":[{}]}', r"field=.trips\[0\]. reason=.*missing required field `port`"),
            ('{"tons":', "reason="),
            ("[]", "Expected `object`"),
        ],
    )
    def test_stored_text_that_does_not_fit_names_field(self, text: str, message: str) -> None:
        with pytest.raises(mp.DataError, match=message):
            mp.ModelCodec(Ship).decode(text)

    def test_new_fields_have_defaults(self) -> None:
        """A removed field is dropped."""
        assert mp.ModelCodec(Tanker).decode('{"tons":3,"sails":2}') == Tanker(tons=3)


def test_msgspec_structs_are_models() -> None:
    codec = mp.ModelCodec(msgspec.defstruct("Boat", [("tons", int)]))

    boat = codec.decode('{"tons":3}')
    assert boat.tons == 3
    assert codec.encode(boat) == '{"tons":3}'


def test_attrs_classes_are_models() -> None:
    boat = attrs.make_class("Boat", {"tons": attrs.field(default=1, type=int)})
    codec = mp.ModelCodec(boat)

    assert codec.decode("{}") == boat()
    assert codec.decode(codec.encode(boat(tons=5))) == boat(tons=5)
    with pytest.raises(mp.InvalidError, match=r"field=.tons."):
        codec.encode(boat(tons="x"))


def test_pydantic_models_are_models() -> None:
    boat = pydantic.create_model("Boat", tons=(int, 1), ports=(list[str], []))
    codec = mp.ModelCodec(boat)

    assert codec.decode(codec.encode(boat(tons=5, ports=["Oslo"]))) == boat(tons=5, ports=["Oslo"])
    with pytest.raises(mp.DataError, match=r"field=.ports\[1\]."):
        codec.decode('{"ports":["a",2]}')


class Dict(mp.Computation):
    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        context.state.set({"tons": record.value["tons"]})


class Modelled(mp.Computation):
    state_version = 1
    codec: mp.Codec
    codecs = {0: mp.JsonCodec()}  # noqa: RUF012 - as users write it

    def __init__(self) -> None:
        self.codec = mp.ModelCodec(Ship)

    def upgrade_state(self, state: Any, version: int) -> Ship:
        return Ship(**state)

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        ship = context.state.get() or Ship()
        ship.tons += record.value["tons"]
        context.state.set(ship)


def test_pipeline_uses_model() -> None:
    """Rows of dicts are upgraded, SQL reads them, and a wrong field is a dead letter."""
    store = mp.Store.in_memory()
    for code, values in ((Dict(), {"a": 3, "b": "heavy"}), (Modelled(), {"a": 4, "b": 1, "c": 2})):
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key="k", at="t").apply(code, name="ships", retries=0)
        runner = mp.LocalRunner(store, progress=False)
        with runner.start(pipeline, stepping=True) as run:
            run.inject("in", [{"k": key, "t": 1, "tons": tons} for key, tons in values.items()])
            run.run_until_quiet()

    rows = {row["key"]: row for row in store.rows_view("ships").to_arrow().to_pylist()}
    assert json.loads(rows["a"]["state"])["tons"] == 7
    assert json.loads(rows["c"]["state"]) == {"tons": 2, "load": 0.0, "trips": [], "flags": []}
    assert (rows["b"]["state"], rows["b"]["state_version"]) == ('{"tons":"heavy"}', 0)
    (letter,) = store.rows_view("dead_letters").to_arrow().column("state").to_pylist()
    assert json.loads(letter)["key"] == "b"
    assert "field=`tons`" in json.loads(letter)["error"]


def test_class_of_a_script_travels_with_its_code() -> None:
    """Pickled by value, as a class of a script or notebook is, with the classes of its fields."""
    module = sys.modules[__name__]
    codec = mp.ModelCodec(Ship)
    cloudpickle.register_pickle_by_value(module)
    try:
        there = pickle.loads(cloudpickle.dumps(codec))
    finally:
        cloudpickle.unregister_pickle_by_value(module)

    text = codec.encode(Ship(tons=3, trips=[Trip("oslo")]))
    assert there.encode(there.decode(text)) == text
