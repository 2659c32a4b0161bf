"""Exactly-once counters of user code."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.executor.computation.context import AMOUNT_MAX, COUNTERS_MAX, Counters, declared_counters
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Picky(mp.Computation):
    """A count of records that fails for odd numbers after counting them."""

    counters = ("seen", "sum")

    def process_record(self, context: Any, record: Any) -> None:
        context.count("seen")
        context.count("sum", record.value["n"])
        if record.value["n"] % 2:
            raise ValueError("odd")


def counted(*bundles: list[int], computation: mp.Computation | None = None) -> Any:
    """Return the totals of a pipeline that restarts between bundles."""
    disk, registry, clock, rng = MemoryObjects(), MemoryRegistry(), ManualClock(), SeededRng(1)
    totals = None
    for numbers in bundles:
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key="k", at="n").apply(computation or Picky(), name="picky", retries=1)
        store = mp.Store.in_memory(objects=disk, registry=registry, clock=clock, rng=rng)
        runner = mp.LocalRunner(store, clock=clock, rng=rng, progress=False, dead_letter_limit=None)
        run = runner.start(pipeline, stepping=True)
        run.inject("in", [{"k": str(n % 3), "n": n} for n in numbers])
        run.run_until_quiet()
        totals = run.stop().totals
        store.close()
    return totals


def test_counts_add_up_over_keys_and_restarts() -> None:
    assert counted([2, 4, 6], [8]).by_computation == {"picky": {"seen": 4, "sum": 20}}


def test_counts_of_a_failed_record_are_reverted() -> None:
    """The record is tried more than once, and its neighbours still count."""
    totals = counted([2, 3, 4, 5, 7])

    assert totals.dead_letters == 3
    assert totals.by_computation == {"picky": {"seen": 2, "sum": 6, "dead_letters": 3}}


def test_undeclared_counter_stops_the_run() -> None:
    """Names of counters must not grow with the data."""

    class Careless(Picky):
        counters = ("seen",)

    with pytest.raises(InvalidError, match="does not declare this counter"):
        counted([2], computation=Careless())


@pytest.mark.parametrize("amount", [-1, AMOUNT_MAX + 1, 2**70, 1.5, True])
def test_invalid_amount_makes_one_dead_letter(amount: Any) -> None:
    """Sums are positions of the table: a falling or overlong one would fail every later commit."""

    class Greedy(Picky):
        def process_record(self, context: Any, record: Any) -> None:
            context.count("sum", amount if record.value["n"] == 4 else record.value["n"])

    totals = counted([2], [4], [6], computation=Greedy())

    assert totals.dead_letters == 1
    assert totals.by_computation == {"picky": {"sum": 8, "dead_letters": 1}}


@pytest.mark.parametrize("declared", ["seen", [1], [""], [str(n) for n in range(COUNTERS_MAX + 1)]])
def test_counters_must_be_a_bounded_list_of_names(declared: Any) -> None:
    with pytest.raises(InvalidError):
        declared_counters(declared, "picky")


def test_truncate_reverts_only_unsettled_counts() -> None:
    counters = Counters()
    counters.add("a", 1)
    counters.settle()
    counters.add("a", 5)
    counters.truncate(0)
    counters.add("b", 2)

    assert counters.sums() == {"a": 1, "b": 2}
