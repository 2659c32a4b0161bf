"""Options of runners: refused where no pipeline can run with them, and who closes the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millpond.executor.local.runner import LocalRunner
from millpond.executor.run.options import RunnerOptions
from millpond.executor.spark.runner import SparkRunner
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.disk_tier import DiskOptions
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("intervals", 0),
        ("cache_mib", -1),
        ("disk_mib", -1),
        ("disk_folder", "millpond"),
        ("pause_timeout", "-1ms"),
        ("on_held", "steal"),
        ("durability", "tape"),
    ],
)
def test_both_runners_refuse_the_same_options(name: str, value: Any) -> None:
    """An option that is out of its range is refused by either runner, and the error names it."""
    for make in (LocalRunner, SparkRunner):
        with pytest.raises(InvalidError, match=name):
            make("nowhere", **{name: value})


def test_an_open_store_keeps_its_durability(tmp_path: Path) -> None:
    """A runner opens its store with the durability that it is given; an open store with another one is refused."""
    registry = MemoryRegistry()
    with Store.open(
        tmp_path / "pond",
        durability="disk",
        leases=lambda _, writer_id: MemoryLeases(registry, ManualClock(), writer_id=writer_id),
    ) as store:
        assert store.durability == "disk"
        assert RunnerOptions(store=store, durability="disk").open_run(lambda opened, _: opened) is store
        with pytest.raises(InvalidError, match=r"Store\.open"):
            RunnerOptions(store=store, durability="os_cache")


def test_intervals_may_be_left_to_the_runner() -> None:
    """Without a number of intervals Spark's parallelism decides."""
    assert RunnerOptions(store="nowhere").intervals is None
    assert RunnerOptions(store="nowhere", cache_mib=2).cache_bytes == 2 * 2**20


def test_the_disk_is_asked_for_in_mib(tmp_path: Path) -> None:
    """Without a number each machine takes the default; 0 is none."""
    assert RunnerOptions(store="nowhere").disk == DiskOptions()
    assert RunnerOptions(store="nowhere", disk_mib=0).disk == DiskOptions(budget_bytes=0)
    assert RunnerOptions(store="nowhere", disk_mib=3, disk_folder=tmp_path).disk == DiskOptions(
        budget_bytes=3 << 20, folder=str(tmp_path)
    )


def test_a_store_of_the_caller_stays_open() -> None:
    """A run on an open store releases nothing, also if it cannot start."""
    store = Store.in_memory(clock=ManualClock(), rng=SeededRng(1))
    options = RunnerOptions(store=store)

    def start(opened: Store, release: Callable[[], None]) -> Store:
        release()
        return opened

    def fail(_store: Store, _release: Callable[[], None]) -> None:
        raise InvalidError("no start")

    assert options.open_run(start) is store
    with pytest.raises(InvalidError, match="no start"):
        options.open_run(fail)
    assert store.committer.refresh().version == 0
