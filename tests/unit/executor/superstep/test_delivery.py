"""Delivery of productions from committed files to intervals."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.values import PythonValues
from millpond.executor.inputs.keys import KeyExtractor
from millpond.executor.interval.bundle import Deliveries, ProductionSummary
from millpond.executor.pipeline.nodes import ComputationNode, Subscription
from millpond.executor.superstep.delivery import (
    PRODUCTION_SCHEMA,
    ProductionSource,
    deliveries_of,
    flatten_productions,
    keyless_letters,
    keys_of,
    read_productions,
    summarise_productions,
    take,
    within,
)
from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import write_row_file
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep
from tests.fixtures.row_updates import row_updates

FENCE = Fence(Sequencer(1), CommitNumber(1))


def production(stream: str, key: str, value: str | None, at: int, **fields: object) -> dict[str, object]:
    return {"stream": stream, "key": key, "value": value, "value_bytes": None, "at": at, **fields}


def productions(*made: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist(list(made), schema=PRODUCTION_SCHEMA)


def node(**keys: KeyExtractor) -> ComputationNode:
    """Make a computation that subscribes to each stream with the given extractor."""
    return ComputationNode(
        name="consumer",
        computation=Computation(),
        subscriptions=tuple(Subscription(stream=stream, key=key) for stream, key in keys.items()),
        produces=(),
    )


def a_file(objects: MemoryObjects, *updates: dict[str, object], superstep: int = 3) -> ProductionSource:
    table = row_updates(updates)
    file = write_row_file(
        objects, Interval("c"), table, superstep=Superstep(superstep), fence=FENCE, token=f"t{superstep}"
    )
    return ProductionSource(path=file.path, superstep=Superstep(3))


class TestReading:
    def test_productions_keep_the_order_of_rows_and_emission(self) -> None:
        table = row_updates(
            [
                {"key": "a", "productions": [production("s", "x", "1", 9), production("t", "y", "2", 8)]},
                {"key": "b", "productions": None},
                {"key": "c", "productions": []},
                {"key": "d", "productions": [production("s", "z", None, 7, value_bytes=b"3")]},
            ]
        )

        assert flatten_productions(table).select(["stream", "key", "value", "value_bytes"]).to_pylist() == [
            {"stream": "s", "key": "x", "value": "1", "value_bytes": None},
            {"stream": "t", "key": "y", "value": "2", "value_bytes": None},
            {"stream": "s", "key": "z", "value": None, "value_bytes": b"3"},
        ]

    def test_rows_of_earlier_supersteps_are_ignored(self) -> None:
        """A file merged by another program may contain them, long delivered."""
        objects = MemoryObjects()
        source = a_file(
            objects,
            {"key": "a", "superstep": 2, "productions": [production("s", "old", "1", 1)]},
            {"key": "b", "superstep": 3, "productions": [production("s", "new", "2", 2)]},
            {"key": "c", "superstep": 3},
        )

        assert read_productions(objects, [source]).column("key").to_pylist() == ["new"]

    def test_rows_of_other_intervals_are_ignored(self) -> None:
        """Several pipelines may share a file."""
        objects = MemoryObjects()
        source = a_file(
            objects,
            {"key": "p/1", "superstep": 3, "productions": [production("s", "mine", "1", 1)]},
            {"key": "q/1", "superstep": 3, "productions": [production("s", "theirs", "1", 1)]},
        )
        own = ProductionSource(
            path=source.path, superstep=source.superstep, interval=Interval("c", "p/", "p0")
        )

        assert read_productions(objects, [own]).column("key").to_pylist() == ["mine"]
        assert read_productions(objects, []).equals(PRODUCTION_SCHEMA.empty_table())

    def test_missing_file_is_named(self) -> None:
        """Undelivered productions must not be skipped because of a lost file."""
        with pytest.raises(DataError, match=r"gone\.parquet"):
            read_productions(MemoryObjects(), [ProductionSource(path="gone.parquet", superstep=Superstep(1))])

    def test_summary_has_count_and_oldest_time_of_each_stream(self) -> None:
        made = productions(
            production("s", "a", "1", 7), production("t", "a", "1", 9), production("s", "b", "1", 5)
        )
        summaries = {summary.stream: summary for summary in summarise_productions(made)}

        assert summaries == {
            "s": ProductionSummary(stream="s", count=2, oldest_at=EventTimeMicros(5)),
            "t": ProductionSummary(stream="t", count=1, oldest_at=EventTimeMicros(9)),
        }
        assert summarise_productions(PRODUCTION_SCHEMA.empty_table()) == ()

    def test_source_with_unknown_streams_concerns_every_consumer(self) -> None:
        unknown = ProductionSource(path="p", superstep=Superstep(1))
        known = ProductionSource(path="p", superstep=Superstep(1), streams=frozenset({"s"}))

        assert unknown.concerns(["t"])
        assert (known.concerns(["s", "t"]), known.concerns(["t"]), known.concerns([])) == (True, False, False)


class TestKeys:
    MADE = productions(
        production("s", "own", '{"k":"field","n":1}', 1),
        production("t", "other", '{"k":"elsewhere"}', 2),
        production("s", "own2", '{"n":2}', 3),
    )

    @pytest.mark.parametrize(
        ("extractor", "keys"),
        [
            (None, ["own", "own2"]),
            ("k", ["field", None]),
            (lambda value: f"n{value['n']}", ["n1", "n2"]),
            (lambda value: value["n"], [None, None]),
            (lambda value: value["absent"], [None, None]),
        ],
        ids=["its own", "a field", "a function", "no text", "a function that raises"],
    )
    def test_consumers_extractor_decides_the_key(
        self, extractor: KeyExtractor, keys: list[str | None]
    ) -> None:
        """A record without a key gets an error."""
        (extracted,) = deliveries_of(self.MADE, node(s=extractor))

        assert extracted.deliveries.keys.to_pylist() == keys
        assert sorted(extracted.errors) == [row for row, key in enumerate(keys) if key is None]
        assert extracted.deliveries.at.tolist() == [1, 3]
        assert extracted.deliveries.values.value(1) == {"n": 2}
        assert keys_of(self.MADE, node(s=extractor)).to_pylist() == [key for key in keys if key is not None]

    def test_each_subscription_gets_its_own_deliveries(self) -> None:
        both = deliveries_of(self.MADE, node(t="k", s=None, u=None))

        assert [(one.deliveries.stream, one.deliveries.keys.to_pylist()) for one in both] == [
            ("t", ["elsewhere"]),
            ("s", ["own", "own2"]),
        ]
        assert deliveries_of(self.MADE, node(u=None)) == ()
        assert len(keys_of(self.MADE, node(u=None))) == 0

    def test_record_without_a_key_becomes_a_letter(self) -> None:
        (extracted,) = deliveries_of(self.MADE, node(s="k"))
        (letter,) = keyless_letters("consumer", extracted)

        assert (letter.computation, letter.stream, letter.key, letter.at) == ("consumer", "s", None, 3)
        assert letter.value == '{"n":2}'
        assert "k" in letter.error

    def test_produced_bytes_are_not_decoded(self) -> None:
        made = productions(production("s", "a", None, 1, value_bytes=b"\x00\xff"))
        (extracted,) = deliveries_of(made, node(s=None))

        assert extracted.deliveries.values.value(0) == b"\x00\xff"


class TestCutting:
    DELIVERIES = Deliveries(
        stream="s",
        keys=pa.array(["b", "", "a", None, "é", "z\U0001f30a", "b"], pa.string()),
        at=np.arange(7),
        values=PythonValues(list(range(7))),
        ids=pa.array([b"0", None, b"2", b"3", b"4", b"5", b"6"], pa.binary()),
    )

    @pytest.mark.parametrize(
        "cuts", [[], ["b"], ["a", "b", "c"], ["z\U0001f30a", "é"], ["0", "zz"], ["\U0001f30a"]]
    )
    def test_cuts_deliver_each_key_to_one_interval_in_order_of_arrival(self, cuts: list[str]) -> None:
        parts = [within(self.DELIVERIES, interval) for interval in intervals_from_boundaries("c", cuts)]
        present = [part for part in parts if part is not None]

        for part, interval in zip(parts, intervals_from_boundaries("c", cuts), strict=True):
            assert part is None or all(interval.contains(key) for key in part.keys.to_pylist())
        assert sorted(at for part in present for at in part.at.tolist()) == [0, 1, 2, 4, 5, 6]
        assert all(part.at.tolist() == sorted(part.at.tolist()) for part in present)

    def test_interval_without_keys_gets_none(self) -> None:
        """Empty deliveries would make the interval run."""
        assert within(self.DELIVERIES, Interval("c", "x", "y")) is None

    def test_interval_with_all_keys_gets_the_same_object(self) -> None:
        """Nothing is copied."""
        keyed = take(self.DELIVERIES, np.array([0, 2, 6]))

        assert within(keyed, Interval("c")) is keyed
        assert within(keyed, Interval("c", "a", "c")) is keyed

    def test_take_keeps_columns_aligned(self) -> None:
        taken = take(self.DELIVERIES, np.array([6, 1]))

        assert taken.keys.to_pylist() == ["b", ""]
        assert taken.at.tolist() == [6, 1]
        assert [taken.values.value(row) for row in range(2)] == [6, 1]
        assert taken.ids is not None
        assert taken.ids.to_pylist() == [b"6", None]
