"""Payloads on both runners: values, keys, times, dead letters, and letters that are decoded again."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest

import millpond as mp
from millpond.testing.fixtures.determinism import ManualClock
from tests.fixtures.both_runners import LocalPlay, plays
from tests.payloads import (
    PAYMENT_AVRO,
    PAYMENT_JSON,
    avro_bytes,
    confluent,
    message_bytes,
    payment_descriptors,
    single_object,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.fixtures.both_runners import Play

_AT = dt.datetime(2026, 11, 23, 17, 0, tzinfo=dt.UTC)
_ROWS = pa.schema([("value", pa.binary()), ("topic", pa.string()), ("offset", pa.int64())])
_PROTO = payment_descriptors()
_OLD_AVRO = {**PAYMENT_AVRO, "fields": [field for field in PAYMENT_AVRO["fields"] if field["name"] != "note"]}


class Keep(mp.Computation):
    """Keeps its records, and fails at refunds."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        if record.value.get("kind") == "REFUND":
            raise ValueError("no refunds")
        context.state.set([*context.state.get([]), [repr(record.value), record.at]])


@pytest.fixture(params=["local", pytest.param("spark", marks=pytest.mark.spark)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Play]]:
    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    with plays(tmp_path, ManualClock, spark) as start:
        yield start


def _pipeline(payload: mp.types.Payload, **options: Any) -> Callable[[], mp.Pipeline]:
    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("payments")
        arguments = {
            "key": ["card", "account"],
            "at": "paid_at",
            "id": lambda row: f"{row['__row_topic']}/{row['__row_offset']}",
            **options,
        }
        pipeline.inject("payments", payload=payload, watermark=mp.BoundedDisorder("1s"), **arguments).apply(
            Keep(), name="keep"
        )
        return pipeline

    return make


def _rows(*payloads: bytes | None, first: int = 0) -> pa.Table:
    cells = [{"value": one, "topic": "t", "offset": first + place} for place, one in enumerate(payloads)]
    return pa.Table.from_pylist(cells, _ROWS)


def _value(card: str, **fields: Any) -> dict[str, Any]:
    return {
        "card": card,
        "account": 7,
        "amount": Decimal("1.50"),
        "paid_at": _AT,
        "kind": "BUY",
        "note": None,
        "lines": [{"sku": "tea", "pieces": 2}],
        "tags": {"raw": b"\xff"},
        **fields,
    }


def _json(card: str, **fields: Any) -> bytes:
    value = {"card": card, "account": 7, "paid_at": _AT.isoformat(), "lines": [{"sku": "tea"}], **fields}
    return orjson.dumps(value)


def _proto(card: str, **fields: Any) -> bytes:
    value = {"card": card, "account": 7, "paid_at": _AT, "lines": [{"sku": "tea", "pieces": 2}], **fields}
    return message_bytes(_PROTO, "shop.Payment", value)


def _letters(pond: Play) -> list[tuple[str, Any]]:
    told = [orjson.loads(state) for state in pond.states("dead_letters").values()]
    return sorted(((letter["error"], mp.letter_value(letter)) for letter in told), key=repr)


def _kept(pond: Play) -> dict[Any, Any]:
    return {mp.decode_key(key): orjson.loads(state) for key, state in pond.states("keep").items()}


def _micros(at: dt.datetime) -> int:
    return int(at.timestamp() * 1_000_000)


_AVRO = avro_bytes(PAYMENT_AVRO, _value("a"))
_MISFIT = "the payload does not fit its schema schema="
_CASES: dict[str, tuple[mp.types.Payload, list[bytes | None], list[tuple[int, str]], dict[str, Any]]] = {
    "json": (
        mp.JsonPayload(PAYMENT_JSON),
        [
            _json("a"),
            b"{",
            _json("b", account="x"),
            b"[]",
            _json("c", lines=[{"sku": "tea", "pieces": 1.5}]),
            None,
        ],
        [
            (
                1,
                f"{_MISFIT}`Payment` reason=`it is not JSON: unexpected end of data: line 1 column 2 (char 1)`",
            ),
            (2, f'{_MISFIT}`Payment` field=`account` reason=`"x" is not of type "integer"`'),
            (3, f'{_MISFIT}`Payment` reason=`[] is not of type "object"`'),
            (4, f'{_MISFIT}`Payment` field=`lines[0].pieces` reason=`1.5 is not of type "integer"`'),
            (5, "the payload is null"),
        ],
        {"card": "a", "account": 7, "paid_at": _AT.isoformat(), "lines": [{"sku": "tea"}]},
    ),
    "avro": (
        mp.AvroPayload(PAYMENT_AVRO),
        [_AVRO, _AVRO[:-3], _AVRO + b"z", b""],
        [
            (1, f"{_MISFIT}`Payment` field=`tags.raw` reason=`the payload ends within it`"),
            (2, f"{_MISFIT}`Payment` reason=`1 bytes are left after the last field`"),
            (3, f"{_MISFIT}`Payment` field=`card` reason=`the payload ends within it`"),
        ],
        _value("a"),
    ),
    "avro of a single object": (
        mp.AvroPayload(PAYMENT_AVRO, framing="single_object", schemas=[_OLD_AVRO]),
        [single_object(_OLD_AVRO, _value("a")), _AVRO, b"\xc3\x01" + bytes(8) + _AVRO],
        [
            (
                1,
                (
                    "the payload is not a single object of Avro, which begins with c3 01 and eight bytes of a fingerprint "
                    f"begins=`{_AVRO[:10].hex(' ')}`"
                ),
            ),
            (2, f"the payload was written with an unknown schema fingerprint=`{'00' * 8}`"),
        ],
        {
            name: _value("a")[name]
            for name in ("card", "account", "amount", "paid_at", "kind", "lines", "tags", "note")
        },
    ),
    "avro of a registry": (
        mp.AvroPayload(PAYMENT_AVRO, framing="confluent", schemas={3: PAYMENT_AVRO}),
        [confluent(3, _AVRO), confluent(4, _AVRO), _AVRO],
        [
            (1, "the payload names an unknown schema schema_id=`4`"),
            (
                2,
                (
                    "the payload is not in Confluent's wire format, which begins with a zero byte and four bytes of a schema's "
                    f"number begins=`{_AVRO[:5].hex(' ')}`"
                ),
            ),
        ],
        _value("a"),
    ),
    "protobuf": (
        mp.ProtobufPayload(_PROTO, "shop.Payment"),
        [_proto("a"), _proto("a")[:-1], b"\x12\x01x", _proto("a") + b"\x0a\x01\xff"],
        [
            (1, f"{_MISFIT}`shop.Payment` field=`lines` reason=`the payload ends within it`"),
            (
                2,
                f"{_MISFIT}`shop.Payment` field=`account` reason=`it was written as another type: wire type 2 instead of 0`",
            ),
            (3, f"{_MISFIT}`shop.Payment` field=`card` reason=`it is not UTF-8: invalid start byte`"),
        ],
        {
            "card": "a",
            "account": 7,
            "paid_at": _AT,
            "kind": "BUY",
            "lines": [{"sku": "tea", "pieces": 2}],
        },
    ),
}


@pytest.mark.parametrize("case", _CASES)
def test_runners_agree_on_values_and_dead_letters(play: Callable[..., Play], case: str) -> None:
    """A letter has the reason and the row as received."""
    payload, payloads, errors, value = _CASES[case]
    rows = _rows(*payloads)
    pond = play(_pipeline(payload))

    pond.inject("payments", rows)
    # The id of a letter marks its record as consumed.
    pond.inject("payments", rows.slice(0, 1))
    pond.settle()

    assert _kept(pond) == {("a", 7): [[repr(value), _micros(_AT)]]}
    letters = [(error, rows.slice(place, 1).to_pylist()[0]) for place, error in errors]
    assert _letters(pond) == sorted(letters, key=repr)
    assert pond.watermark("keep") == _micros(_AT) - 1_000_000
    shown = pond.store.rows_view("keep").to_arrow()
    assert shown.schema.field("account").type == pa.int64()


def test_letter_is_decoded_again_once_its_schema_exists(play: Callable[..., Play], tmp_path: Path) -> None:
    """The retried record has key, time, id and value."""
    schemas = tmp_path / "schemas"
    schemas.mkdir()
    (schemas / "1.avsc").write_bytes(orjson.dumps(_OLD_AVRO))
    pond = play(_pipeline(mp.AvroPayload(PAYMENT_AVRO, framing="confluent", schemas=schemas)))
    old = confluent(1, avro_bytes(_OLD_AVRO, _value("old")))
    new, refund = _value("new", note="tea"), _value("refund", kind="REFUND")
    pond.inject(
        "payments",
        _rows(
            old, *(confluent(2, avro_bytes(PAYMENT_AVRO, one)) for one in (new, refund)), confluent(3, b"")
        ),
    )
    pond.settle()
    assert len(_letters(pond)) == 3
    (schemas / "2.avsc").write_bytes(orjson.dumps(PAYMENT_AVRO))

    mp.retry_dead_letters(pond.store, computation="keep")
    pond.restart()
    pond.settle()
    pond.inject("payments", _rows(old, confluent(2, avro_bytes(PAYMENT_AVRO, new))))
    pond.settle()

    assert _kept(pond)["new", 7] == [[repr(new), _micros(_AT)]]
    assert [
        (error.partition(" schema_id")[0], value.get("offset", value)) for error, value in _letters(pond)
    ] == [
        ("ValueError: no refunds", refund),
        ("the payload names an unknown schema", 3),
    ]


def test_columns_beside_the_payload_give_key_and_time(play: Callable[..., Play]) -> None:
    """They have the prefix ``__row_``, and are no part of the value."""
    make = _pipeline(
        mp.JsonPayload({"type": "object"}), key="__row_topic", at="__row_offset", at_unit="s", id=None
    )
    pond = play(make)

    pond.inject("payments", _rows(b'{"n":1}', b'{"topic":"x"}', b"no", first=5))
    pond.settle()

    assert {key: orjson.loads(state) for key, state in pond.states("keep").items()} == {
        "t": [["{'n': 1}", 5_000_000], ["{'topic': 'x'}", 6_000_000]]
    }
    assert [value["offset"] for _, value in _letters(pond)] == [7]


def test_consumers_read_keys_and_marks_from_decoded_fields(play: Callable[..., Play]) -> None:
    """Members too; a payload that fails to decode has neither."""

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("payments")
        payments = pipeline.inject(
            "payments",
            key="card",
            at="at",
            at_unit="us",
            payload=mp.JsonPayload({"type": "object"}),
            watermark=mp.MarkColumn("mark"),
            members=["a", "b"],
            member="shop",
        )
        payments.apply(Keep(), name="keep")
        payments.apply(Keep(), name="by_shop", key=lambda value: value["shop"])
        return pipeline

    pond = play(make)
    given = [{"card": f"c{n}", "shop": "ab"[n % 2], "at": n, "mark": n * 10} for n in range(1, 5)]

    pond.inject("payments", _rows(*map(orjson.dumps, given), b"{"))
    pond.settle()

    assert {key: len(orjson.loads(state)) for key, state in pond.states("by_shop").items()} == {
        "a": 2,
        "b": 2,
    }
    assert pond.states("keep").keys() == {"c1", "c2", "c3", "c4"}
    assert pond.watermark("keep") == 30
    told = [orjson.loads(state) for state in pond.states("dead_letters").values()]
    assert sorted(letter["computation"] for letter in told) == ["by_shop", "keep"]


def test_history_is_decoded_and_sorted_by_time(play: Callable[..., Play]) -> None:
    history = _rows(
        _json("a", n=2, paid_at="2026-11-23T00:00:02Z"), b"{", _json("a", n=1, paid_at="2026-11-23T00:00:01Z")
    )

    def make() -> mp.Pipeline:
        pipeline = mp.Pipeline("payments")
        payments = pipeline.inject("payments", key="card", at="paid_at", payload=mp.JsonPayload(PAYMENT_JSON))
        payments.apply(Keep(), name="keep", backfill=history)
        return pipeline

    pond = play(make)
    pond.settle()

    assert [at for _, at in orjson.loads(pond.states("keep")["a"])] == [
        _micros(dt.datetime(2026, 11, 23, 0, 0, second, tzinfo=dt.UTC)) for second in (1, 2)
    ]
    assert len(_letters(pond)) == 1


def test_payload_column_of_another_type_is_refused(play: Callable[..., Play]) -> None:
    pond = play(_pipeline(mp.JsonPayload({"type": "object"}), key="card", id=None))

    def give() -> None:
        if isinstance(pond, LocalPlay):
            pond.inject("payments", pa.table({"value": [1]}))
        else:
            frame = pond.spark.range(1).toDF("value")
            mp.SparkRunner(pond.store, spark=pond.spark).open(pond.make(), {"payments": frame})

    with pytest.raises(mp.InvalidError, match="the payload column is neither binary nor text"):
        give()
