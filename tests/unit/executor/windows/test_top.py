"""The top N of a window, and unions of streams."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.time.watermark_policies import BoundedDisorder, ManualWatermark
from millpond.executor.windows.combiners import Count, Sum, ToList
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window import WindowFn
from millpond.executor.windows.window_fns import FixedWindows, SlidingWindows
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class _Standing(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        """Keep each window's newest pane and the number of its panes."""
        shown, state = record.value, context.state.get({})
        if not shown["pane"]["is_retraction"]:
            window = str(shown["window"][0])
            state[window] = [shown["value"], state.get(window, [None, 0])[1] + 1]
        context.state.set(state)


def _run(pipeline: Pipeline, stream: str, *pieces: list[dict[str, Any]], passes: int | None = None) -> Any:
    """Return the last state of each group; advance the watermark to ``passes`` after the first piece."""
    clock = ManualClock()
    store = Store.in_memory(clock=clock, rng=SeededRng(1))
    run = LocalRunner(store, clock=clock, rng=SeededRng(2), progress=False).start(pipeline, stepping=True)
    for piece in pieces:
        run.inject(stream, piece)
        run.run_until_quiet()
        if passes is not None:
            run.advance_watermark(stream, passes)
            run.run_until_quiet()
    run.finish(stream)
    run.run_until_quiet()
    run.stop()
    assert not len(store.rows_view("dead_letters").to_arrow())
    rows = store.rows_view("standing").to_arrow().to_pylist()
    return {row["key"]: orjson.loads(row["state"]) for row in rows}


def _sales(window_fn: WindowFn, policy: Any = None, **options: Any) -> Pipeline:
    pipeline = Pipeline("p")
    sales = pipeline.inject("sales", key="shop", at="at", watermark=policy or BoundedDisorder("1ms"))
    windowed = sales.window(window_fn, allowed_lateness="100us")
    windowed.top(2, Sum("amount"), name="best", key="product", **options).apply(_Standing(), name="standing")
    return pipeline


def _sale(product: str, amount: int, at: int) -> dict[str, Any]:
    return {"shop": "s", "product": product, "amount": amount, "at": at}


def _listed(*best: tuple[str, int]) -> list[dict[str, Any]]:
    return [{"key": key, "value": value} for key, value in best]


SALES = st.lists(
    st.builds(_sale, st.sampled_from(["a1", "a2", "b1", "b2"]), st.integers(-5, 20), st.integers(0, 30)),
    min_size=1,
    max_size=20,
)


@given(SALES, st.booleans(), st.booleans(), st.booleans())
def test_top_equals_sorting_all_sums(sales, sliding, smallest, grouped) -> None:
    """Holds for every window and group, whatever the order of the input."""
    window_fn = SlidingWindows("10us", "5us") if sliding else FixedWindows("10us")
    among = (lambda key: key[0]) if grouped else None
    shown = _run(_sales(window_fn, smallest=smallest, among=among), "sales", sales)

    sums: dict[tuple[str, int], dict[str, int]] = {}
    for sale in sales:
        first = sale["at"] // 10 * 10
        starts = [s for s in range(first - 10, sale["at"] + 1, 5) if s <= sale["at"] < s + 10]
        for start in starts if sliding else [first]:
            of_window = sums.setdefault((sale["product"][0] if grouped else "all", start), {})
            of_window[sale["product"]] = of_window.get(sale["product"], 0) + sale["amount"]
    expected: dict[str, Any] = {}
    for (group, start), totals in sums.items():
        order = sorted(totals.items(), key=lambda item: (item[1], item[0]), reverse=not smallest)
        expected.setdefault(group, {})[str(start)] = [_listed(*order[:2]), 1]
    assert shown == expected


def test_late_element_that_changes_the_order_emits_one_new_list() -> None:
    first = [_sale("a", 9, 1), _sale("b", 5, 2), _sale("c", 7, 3)]
    late = [_sale("a", -8, 4)]
    pipeline = _sales(FixedWindows("10us"), ManualWatermark())

    assert _run(pipeline, "sales", first, late, passes=20) == {"all": {"0": [_listed(("c", 7), ("b", 5)), 2]}}


def test_renamed_top_continues_both_of_its_steps() -> None:
    """The open window keeps the sums of the former name."""
    store = Store.in_memory()
    for name, former, piece in (("best", None, [_sale("a", 9, 1)]), ("top", "best", [_sale("a", 4, 2)])):
        pipeline = Pipeline("p")
        sales = pipeline.inject("sales", key="shop", at="at", watermark=ManualWatermark())
        best = sales.window(FixedWindows("10us")).top(
            2, Sum("amount"), name=name, key="product", renamed_from=former
        )
        best.apply(_Standing(), name="standing")
        with LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
            run.inject("sales", piece)
            if former:
                run.finish("sales")
            run.run_until_quiet()
    rows = store.rows_view("standing").to_arrow().to_pylist()
    assert [orjson.loads(row["state"]) for row in rows] == [{"0": [_listed(("a", 13)), 1]}]


def test_top_refuses_a_count_below_one_and_a_plain_function() -> None:
    stream = Pipeline("p").inject("s", key="k", at="at").window(FixedWindows("10us"))
    with pytest.raises(InvalidError):
        stream.top(0, Count(), name="best")
    with pytest.raises(InvalidError):
        stream.top(1, len, name="best")


def test_union_has_the_records_of_all_its_streams() -> None:
    """Windows count rows and panes of the union together."""
    pipeline = Pipeline("p")
    first = pipeline.inject("a", key="k", at="at", watermark=BoundedDisorder("1ms"))
    panes = first.window(FixedWindows("10us")).combine(Sum("n"), name="sums")
    lists = panes.union(first.map(lambda row: row["n"], name="plain"), name="both")
    lists.window(FixedWindows("10us")).combine(ToList(), name="lists").apply(_Standing(), name="standing")

    rows = [{"k": "x", "at": 1, "n": 3}, {"k": "x", "at": 2, "n": 4}]
    shown = _run(pipeline, "a", rows)

    assert sorted(shown["x"]["0"][0]) == [3, 4, 7]


def test_union_needs_different_streams_of_one_pipeline() -> None:
    one, other = Pipeline("p"), Pipeline("q")
    stream = one.inject("a", key="k", at="at")
    for others in ((), (stream,), (other.inject("b", key="k", at="at"),)):
        with pytest.raises(InvalidError, match="union"):
            stream.union(*others, name="both")
