"""Counters: what user code counts of a computation as a whole, exactly once."""

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
    """Counts what it gets, and fails for odd numbers after it has counted them."""

    counters = ("seen", "sum")

    def process_record(self, context: Any, record: Any) -> None:
        """Count first."""
        context.count("seen")
        context.count("sum", record.value["n"])
        if record.value["n"] % 2:
            raise ValueError("odd")


def counted(*bundles: list[int], computation: mp.Computation | None = None) -> Any:
    """The totals of a pipeline that is stopped and started between bundles."""
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
    """One sum for all keys, kept with the positions of the pipeline."""
    assert counted([2, 4, 6], [8]).by_computation == {"picky": {"seen": 4, "sum": 20}}


def test_what_a_failing_hook_has_counted_is_taken_back() -> None:
    """A record that becomes a dead letter counts nothing, however often it was tried; its neighbours do."""
    totals = counted([2, 3, 4, 5, 7])

    assert totals.dead_letters == 3
    assert totals.by_computation == {"picky": {"seen": 2, "sum": 6, "dead_letters": 3}}


def test_a_counter_that_is_not_declared_is_refused() -> None:
    """The set of counters is the code's, so it cannot grow with the data: the run stops."""

    class Careless(Picky):
        counters = ("seen",)

    with pytest.raises(InvalidError, match="does not declare this counter"):
        counted([2], computation=Careless())


@pytest.mark.parametrize("amount", [-1, AMOUNT_MAX + 1, 2**70, 1.5, True])
def test_what_no_sum_of_the_store_can_take_is_one_records_failure(amount: Any) -> None:
    """Sums are positions of the table: one that fell, or was too long, would end every run at its commit."""

    class Greedy(Picky):
        def process_record(self, context: Any, record: Any) -> None:
            context.count("sum", amount if record.value["n"] == 4 else record.value["n"])

    totals = counted([2], [4], [6], computation=Greedy())

    assert totals.dead_letters == 1
    assert totals.by_computation == {"picky": {"sum": 8, "dead_letters": 1}}


@pytest.mark.parametrize("declared", ["seen", [1], [""], [str(n) for n in range(COUNTERS_MAX + 1)]])
def test_counters_are_a_bounded_list_of_names(declared: Any) -> None:
    """It is an error where the pipeline is written."""
    with pytest.raises(InvalidError):
        declared_counters(declared, "picky")


def test_counts_can_be_taken_back_until_they_settle() -> None:
    """A turn that is undone leaves the turns before it alone."""
    counters = Counters()
    counters.add("a", 1)
    counters.settle()
    counters.add("a", 5)
    counters.truncate(0)
    counters.add("b", 2)

    assert counters.sums() == {"a": 1, "b": 2}
