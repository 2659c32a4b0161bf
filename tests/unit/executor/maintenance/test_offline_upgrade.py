"""Offline upgrades of stored states."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance import offline_upgrade
from millpond.executor.maintenance.offline_upgrade import Upgraded, upgrade_offline
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.failpoint import listening
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.memory import MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.codec import Codec, JsonCodec, MsgpackCodec
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng

SECOND_US = 1_000_000


class Count(Computation):
    """A count with a timer and a hold."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)
        context.state.hold(record.at)
        context.set_timer(record.at + 100 * SECOND_US, "end")

    def process_timer(self, context, timer):
        context.state.set(context.state.get(0) + 1_000)


class Packed(Count):
    """The count in a dict and another codec; the upgrade fails for the state 13."""

    state_version = 1
    codec: Codec = MsgpackCodec()
    codecs = {0: JsonCodec()}  # noqa: RUF012 - as in user code

    def upgrade_state(self, state: Any, version: int) -> Any:
        if state == 13:
            raise ArithmeticError("thirteen")
        return {"count": state}

    def process_record(self, context, record):
        count = context.state.get({"count": 0})["count"]
        context.state.set({"count": count + 1})

    def process_timer(self, context, timer):
        count = context.state.get({"count": 0})["count"]
        context.state.set({"count": count + 1_000})


class Pond:
    """A store in memory with Parquet files, and pipelines that run on it in turn."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.opened, self.number = ManualClock(), 0, 0

    def store(self) -> Store:
        self.opened += 1
        rng = SeededRng(self.opened)
        return Store.in_memory(
            objects=self.objects, registry=self.registry, clock=self.clock, rng=rng, row_format=PARQUET
        )

    @staticmethod
    def pipeline(computation: Computation, name: str = "c", **options: Any) -> EnginePipeline:
        graph = EnginePipeline("p")
        graph.inject("in", key="k", at="t", id="id").apply(computation, name=name, **options)
        return graph

    def start(self, computation: Computation) -> Any:
        rng = SeededRng(f"r{self.opened}")
        runner = LocalRunner(self.store(), clock=self.clock, rng=rng, progress=False, intervals=2)
        return runner.start(self.pipeline(computation), stepping=True)

    def run(self, computation: Computation, *keys: str) -> None:
        with self.start(computation) as run:
            rows = [{"k": key, "t": SECOND_US, "id": f"{self.number + n}"} for n, key in enumerate(keys)]
            self.number += len(keys)
            if rows:
                run.inject("in", rows)
            run.run_until_quiet()

    def upgrade(self, **options: Any) -> list[Upgraded]:
        topology = self.pipeline(options.pop("computation", None) or Packed()).check()
        return upgrade_offline(self.store(), topology, self.clock, SeededRng(f"u{self.opened}"), **options)

    def rows(self) -> dict[str, dict[str, Any]]:
        table = self.store().rows_view("c").to_arrow(whole=True).to_pylist()
        return {row["key"]: row for row in table}

    def counts(self) -> dict[str, tuple[Any, int]]:
        return {
            key: (
                orjson.loads(row["state"])
                if row["state"] is not None
                else MsgpackCodec().decode(row["state_bytes"]),
                row["state_version"],
            )
            for key, row in self.rows().items()
        }


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that an upgrade must not change."""
    return {name: row[name] for name in ("key", "timers", "hold", "superstep", "record_ids", "productions")}


def test_upgrade_changes_state_and_version_only():
    pond = Pond()
    pond.run(Count(), "a", "b", "b", "c")
    before = pond.rows()
    pond.run(Packed(), "c")
    done = pond.upgrade()

    assert done == [Upgraded(computation="c", state_version=1, rows=2, current=1)]
    assert pond.counts() == {"a": ({"count": 1}, 1), "b": ({"count": 2}, 1), "c": ({"count": 2}, 1)}
    assert [unchanged(pond.rows()[key]) for key in "ab"] == [unchanged(before[key]) for key in "ab"]
    assert before["a"]["hold"] is not None
    pond.number = 0
    pond.run(Packed(), "a")
    assert pond.counts()["a"] == ({"count": 1}, 1), "the id of its first record is known"
    assert verify_store(pond.objects).findings == ()
    assert pond.upgrade() == [Upgraded(computation="c", state_version=1, current=3)]


def test_timers_fire_with_the_upgraded_state():
    pond = Pond()
    pond.run(Count(), "a")
    pond.upgrade()
    with pond.start(Packed()) as run:
        run.finish("in")
        run.run_until_quiet()

    assert pond.counts() == {"a": ({"count": 1_001}, 1)}


def test_dry_run_calls_the_code_but_commits_nothing():
    """The pipeline may run meanwhile."""
    pond = Pond()
    pond.run(Count(), *["bad"] * 13, "a")
    with pond.start(Packed()):
        version = pond.store().snapshot().version
        (done,) = pond.upgrade(dry_run=True)

        assert (done.rows, done.failed) == (1, 1)
        assert pond.store().snapshot().version == version


def test_failing_row_is_kept_and_reported():
    """The next upgrade tries it again."""
    pond = Pond()
    pond.run(Count(), *["bad"] * 13, "a")
    (done,) = pond.upgrade()

    assert (done.rows, done.failed, done.failures) == (1, 1, [("bad", "ArithmeticError: thirteen")])
    assert pond.counts() == {"a": ({"count": 1}, 1), "bad": (13, 0)}
    assert pond.upgrade()[0].failed == 1


def test_upgrade_of_a_running_pipeline_is_refused():
    pond = Pond()
    pond.run(Count(), "a")
    with pond.start(Packed()), pytest.raises(ConflictError):
        pond.upgrade()
    assert pond.counts() == {"a": (1, 0)}


@pytest.mark.parametrize("bytes_at_once", [1 << 26, 0])
def test_upgrade_killed_anywhere_is_finished_by_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
):
    """Each kill leaves a sound store, and each row is upgraded once."""

    class Killed(BaseException):
        pass

    monkeypatch.setattr(offline_upgrade, "_ROWS_AT_ONCE", 2)
    monkeypatch.setattr(offline_upgrade, "_BYTES_AT_ONCE", bytes_at_once)
    pond = Pond()
    keys = [f"k{number}" for number in range(12)]
    pond.run(Count(), *keys)
    pond.run(Count(), *keys[:6])
    kills = 0
    for last in range(40):
        left = [last]

        def count_down(_: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        try:
            with listening(count_down):
                pond.upgrade()
        except Killed:
            kills += 1
            # The leases of a dead process expire.
            pond.registry = MemoryRegistry()
        assert verify_store(pond.objects).findings == ()
    assert kills > 10
    pond.upgrade()

    assert pond.upgrade() == [Upgraded(computation="c", state_version=1, current=12)]
    assert pond.counts() == {key: ({"count": 2 if index < 6 else 1}, 1) for index, key in enumerate(keys)}


def test_invalid_computations_are_refused():
    """A declared rename must first happen in a run."""
    pond = Pond()
    pond.run(Count(), "a")
    with pytest.raises(InvalidError, match="no such computation"):
        pond.upgrade(computations=["d"])
    with pytest.raises(InvalidError, match="declares no state_version"):
        pond.upgrade(computation=Count(), computations=["c"])
    renamed = pond.pipeline(Packed(), name="new", renamed_from="c").check()
    with pytest.raises(InvalidError, match="start it once"):
        upgrade_offline(pond.store(), renamed, pond.clock, SeededRng(1))
