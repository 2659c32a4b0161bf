"""Options that both runners share."""

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
def test_both_runners_refuse_options_out_of_range(name: str, value: Any) -> None:
    for make in (LocalRunner, SparkRunner):
        with pytest.raises(InvalidError, match=name):
            make("nowhere", **{name: value})


def test_open_store_with_another_durability_is_refused(tmp_path: Path) -> None:
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


def test_intervals_default_to_none() -> None:
    """Spark's parallelism then decides."""
    assert RunnerOptions(store="nowhere").intervals is None
    assert RunnerOptions(store="nowhere", cache_mib=2).cache_bytes == 2 * 2**20


def test_disk_mib_sets_the_budget(tmp_path: Path) -> None:
    """Without the option each machine takes its default; 0 disables the disk."""
    assert RunnerOptions(store="nowhere").disk == DiskOptions()
    assert RunnerOptions(store="nowhere", disk_mib=0).disk == DiskOptions(budget_bytes=0)
    assert RunnerOptions(store="nowhere", disk_mib=3, disk_folder=tmp_path).disk == DiskOptions(
        budget_bytes=3 << 20, folder=str(tmp_path)
    )


def test_store_opened_by_the_caller_stays_open() -> None:
    """This includes a run that cannot start."""
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("", "must be a path or a URL"),
        (" ", "must be a path or a URL"),
        (7, "must be a path or a URL"),
        ("s3:/bucket/checkpoints", "one slash"),
        ("s3://user:password@bucket/checkpoints", "no user and password"),
        (__file__, "must be a folder"),
        ("pond", "store's own files"),
        ("pond/rows", "store's own files"),
        ("pond/checkpoints-2", "store's own files"),
    ],
)
def test_nonsensical_checkpoint_locations_are_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidError, match=words):
        SparkRunner("pond", checkpoint_location=given)


def test_checkpoint_location_moves_the_checkpoints_of_all_streams(tmp_path: Path) -> None:
    """By default they lie in the store's folder; a stream's name is one folder."""
    assert SparkRunner("s3://bucket/pond").checkpoint("a/b") == "s3://bucket/pond/checkpoints/a%2Fb"
    assert SparkRunner(tmp_path).checkpoint("a") == str(tmp_path / "checkpoints/a")
    elsewhere: Any
    for elsewhere in ("s3a://other/folder/", tmp_path / "checkpoints" / "mine", tmp_path.parent):
        runner = SparkRunner(tmp_path, checkpoint_location=elsewhere)
        assert runner.checkpoint("a") == f"{elsewhere}/a".replace("//a", "/a")
    with pytest.raises(InvalidError, match="no such option"):
        LocalRunner(tmp_path, checkpoint_location="elsewhere")  # type: ignore[call-arg]
