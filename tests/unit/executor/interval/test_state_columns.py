"""States as columns, against a dict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation import key_numbers
from millpond.executor.computation.timers import Timer
from millpond.executor.interval import state_columns
from millpond.executor.interval.state_columns import StateColumns
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.rows.state_schema import SchemaCodec, cells_of, struct_of

CODEC = SchemaCodec(
    pa.schema([("n", pa.int64()), ("x", pa.float64()), ("parts", pa.list_(pa.int32())), ("t", pa.string())])
)
KIND = CODEC.column.type
NAMES = [f"k{number}" for number in range(12)]

_cells = st.tuples(
    st.none() | st.integers(0, 2),
    st.none() | st.sampled_from([0.0, -0.0, 1.5, math.nan]),
    st.none() | st.lists(st.integers(0, 2), max_size=2),
    st.none() | st.sampled_from(["", "é"]),
)
_states = st.none() | st.none() | _cells


def change_of(columns: StateColumns, keys: Sequence[str], after: Sequence[Any]) -> Any:
    numbers = columns.numbers_of(keys)
    nothing = pa.array([], pa.struct([]))
    owners = np.empty(0, np.int64)
    before = columns.states_of(numbers)
    return columns.changed(numbers, np.arange(len(keys)), before, struct_of(after, KIND), nothing, owners)


@pytest.fixture(autouse=True)
def _few_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_numbers, "_IDLE_MIN", 3)
    monkeypatch.setattr(state_columns, "_DEAD_MIN", 3)
    monkeypatch.setattr(state_columns, "_CHUNK_BYTES_MAX", 200)
    monkeypatch.setattr(state_columns, "_LEAVING", 2)


@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["apply", "apply", "apply", "undo", "take", "take up", "forget"]),
            st.dictionaries(st.sampled_from(NAMES), _states, min_size=1),
        ),
        max_size=12,
    )
)
def test_columns_hold_what_a_dict_would(script: Any) -> None:
    columns, model = StateColumns(CODEC), dict[str, Any]()
    for what, states in script:
        keys = sorted(states)
        stored = [model.get(key) for key in keys]
        if what == "take":
            keys = columns.among(keys)
            assert columns.take(keys).states == [model.pop(key) for key in keys]
        elif what == "take up":
            keys = [key for key in keys if key not in model and states[key] is not None]
            own = [states[key] for key in keys]
            assert columns.take_up(keys, own, [()] * len(keys)) == keys
            model.update(zip(keys, own, strict=True))
        elif what != "forget":
            change = change_of(columns, keys, [states[key] for key in keys])
            after = cells_of(struct_of([states[key] for key in keys], KIND))
            assert change.changed.tolist() == [old != new for old, new in zip(stored, after, strict=True)]
            assert change.deleted.tolist() == [
                old is not None and new is None for old, new in zip(stored, after, strict=True)
            ]
            columns.apply(change)
            if what == "undo":
                assert columns.undo(keys, change.former).states == stored
                for key in keys:
                    model.pop(key, None)
            else:
                for key, old, new in zip(keys, stored, after, strict=True):
                    model[key] = old if old == new else new
                model = {key: state for key, state in model.items() if state is not None}
        assert sorted(columns.keys) == sorted(columns.among(NAMES)) == sorted(model)
        assert len(columns) == len(model)
        assert cells_of(columns.states_of(columns.numbers_of(NAMES))) == [model.get(name) for name in NAMES]


def test_rows_with_timers_and_text_are_not_taken_up() -> None:
    columns = StateColumns(CODEC)
    timer = Timer("", TimeDomain.EVENT, 1, 1)
    cells = (1, None, None, None)

    assert columns.take_up(["a", "b", "c"], [cells, '{"n":1}', cells], [(timer,), (), ()]) == ["c"]
    assert (columns.next_at, columns.held_at, columns.due_keys(10).to_pylist()) == (None, None, [])


def test_dead_states_are_dropped() -> None:
    columns = StateColumns(CODEC)
    for number in range(100):
        columns.apply(change_of(columns, NAMES, [(number, None, None, None)] * len(NAMES)))

    assert sum(map(len, columns._chunks)) <= 3 * len(NAMES) + state_columns._DEAD_MIN
    assert columns.size_bytes < 10_000
