"""Productions that are routed by a shuffle."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.interval.bundle import DeadLetter, Deliveries, IntervalPlan
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.spark.routed import (
    ProductionRoutes,
    RoutedProductions,
    make_routing_task,
    pop_productions,
    route_productions,
)
from millpond.executor.spark.task_plan import PRODUCTIONS, TARGET, Route, WorkerSetting
from millpond.executor.superstep.delivery import PRODUCTION_SCHEMA, ProductionSource, UndeliveredProductions
from millpond.statestore.errors import DataError, InternalError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep

SLOTS = 3
LOWS = {"own": ("", "b", "k\u00e9", "\U0001f30a"), "by_field": ("", "m")}
POSITIONS = {"own": (4, 0, 7, 2), "by_field": (1, 3)}


def key_of(value: Any) -> str:
    """Extract the second consumer's key, which some values lack."""
    key: str = value["key"]
    return key


def nodes() -> dict[str, ComputationNode]:
    pipeline = EnginePipeline("p")
    source = pipeline.inject("in", key="k", at="at")
    source.apply(Computation(), name="first", produces=["mid", "more"])
    pipeline.add(Computation(), name="own", subscribes={"mid": None})
    pipeline.add(Computation(), name="by_field", subscribes={"mid": key_of, "more": key_of})
    return dict(pipeline.check().computations)


NODES = nodes()
ROUTES = ProductionRoutes(
    setting=WorkerSetting(
        url="memory",
        storage_options={},
        durability="disk",
        code=cloudpickle.dumps(NODES),
        code_digest="routed",
        cache_bytes=1,
    ),
    slots=SLOTS,
    consumers={name: Route(lows=LOWS[name], positions=POSITIONS[name]) for name in LOWS},
    sources={},
)
PARTS = {
    position: IntervalPlan(
        interval=Interval(name, low, high),
        fence=Fence(Sequencer(1), CommitNumber(1)),
        watermark=EventTimeMicros(0),
        files=(),
        due=False,
    )
    for name in LOWS
    for position, low, high in zip(POSITIONS[name], LOWS[name], (*LOWS[name][1:], None), strict=True)
}

PRODUCTION = st.fixed_dictionaries(
    {
        "stream": st.sampled_from(["mid", "more", "unread"]),
        "key": st.text(max_size=3),
        "value": st.one_of(
            st.text(alphabet="abkmz", max_size=3).map(lambda key: f'{{"key": "{key}"}}'),
            st.just("1"),
            st.none(),
        ),
        "value_bytes": st.one_of(st.none(), st.binary(max_size=2)),
        "at": st.integers(0, 3),
    }
)


def told(deliveries: Deliveries) -> list[tuple[Any, ...]]:
    """Return all fields of the deliveries."""
    keys = deliveries.keys.to_pylist()
    return [
        (deliveries.stream, key, int(at), deliveries.values.value(row))
        for row, (key, at) in enumerate(zip(keys, deliveries.at, strict=True))
    ]


def letter(letter: DeadLetter) -> tuple[Any, ...]:
    return letter.computation, letter.stream, letter.value, letter.error, letter.at


@given(st.lists(st.lists(PRODUCTION, max_size=12), max_size=4), st.data())
def test_routed_productions_equal_those_read_by_the_slot(
    files: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    """Spark may bring the rows in any order."""
    tables = [pa.Table.from_pylist(file, PRODUCTION_SCHEMA) for file in files]
    rows = [
        batch
        for number, table in enumerate(tables)
        for batch in route_productions(table, number, ROUTES, NODES, read_bytes=10)
    ]
    rows = data.draw(st.permutations(rows))
    sources = [ProductionSource(path=str(number), superstep=Superstep(1)) for number in range(len(tables))]
    read = UndeliveredProductions(sources, lambda source: tables[int(source.path)])

    read_bytes = 0
    for slot in range(SLOTS):
        routed, outside = pop_productions([row for row in rows if row.column(TARGET)[0].as_py() == slot])
        assert outside == []
        parts = {position: part for position, part in PARTS.items() if position % SLOTS == slot}
        letters = []
        for position, part in parts.items():
            node = NODES[part.interval.computation]
            expected = [told(deliveries) for deliveries in read.deliveries(node, part.interval)]
            got = [] if routed is None else [told(mine) for mine in routed.deliveries(position, node)]
            assert got == expected
            letters += read.letters(node) if not part.interval.low else []
        if routed is not None:
            routed.check_slot(slot, SLOTS)
            read_bytes += routed.read_bytes
        given_letters = [] if routed is None else list(routed.letters(parts))
        assert sorted(map(letter, given_letters), key=repr) == sorted(map(letter, letters), key=repr)
    told_of = {row["stream"] for file in files for row in file}
    assert read_bytes == 10 * sum(bool({row["stream"] for row in file} & {"mid", "more"}) for file in files)
    assert told_of <= {"mid", "more", "unread"}


def test_routed_productions_and_outside_records_share_a_batch() -> None:
    table = pa.Table.from_pylist(
        [{"stream": "mid", "key": "a", "value": "1", "value_bytes": None, "at": 5}], PRODUCTION_SCHEMA
    )
    own = {"own": Route(lows=("",), positions=(0,))}
    (row,) = route_productions(
        table, 0, ProductionRoutes(setting=ROUTES.setting, slots=1, consumers=own, sources={}), NODES, 7
    )
    both = pa.record_batch(
        {
            TARGET: pa.array([0, 0], pa.int32()),
            PRODUCTIONS: pa.array([row.column(PRODUCTIONS)[0].as_py(), None], pa.binary()),
            "n": pa.array([None, 3], pa.int64()),
        }
    )

    routed, (outside,) = pop_productions([both])

    assert routed is not None
    assert (routed.read_bytes, [told(one) for one in routed.deliveries(0, NODES["own"])]) == (
        7,
        [[("mid", "a", 5, 1)]],
    )
    assert outside.to_pylist() == [{TARGET: 0, "n": 3}]
    with pytest.raises(InternalError, match="slot of their interval"):
        routed.check_slot(1, 2)


def test_missing_file_is_raised_by_the_receiving_slot(tmp_path: Any) -> None:
    """The routing task yields the error as a row."""
    setting = WorkerSetting(
        url=str(tmp_path),
        storage_options={},
        durability="disk",
        code=ROUTES.setting.code,
        code_digest=str(tmp_path),
        cache_bytes=1,
    )
    source = ProductionSource(path="computation=first/gone.parquet", superstep=Superstep(1))
    routes = ProductionRoutes(
        setting=setting, slots=SLOTS, consumers=ROUTES.consumers, sources={0: [(0, source)]}
    )

    rows = list(make_routing_task(routes)([]))

    with pytest.raises(DataError, match="missing"):
        pop_productions(rows)


def test_slot_without_its_own_productions_delivers_none() -> None:
    routed = RoutedProductions(
        pa.table(
            {
                name: pa.array([], kind)
                for name, kind in {
                    "target": pa.int32(),
                    "number": pa.int64(),
                    "stream": pa.string(),
                    "key": pa.string(),
                    "at": pa.int64(),
                    "value": pa.string(),
                    "value_bytes": pa.binary(),
                    "error": pa.string(),
                }.items()
            }
        ),
        0,
    )

    assert routed.deliveries(0, NODES["own"]) == []
    assert list(routed.letters({})) == []
