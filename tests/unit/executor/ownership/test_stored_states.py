"""Versions of states in the table."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.positions import stored_state_version
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log import table
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.codec import Codec, JsonCodec, MsgpackCodec
from millpond.statestore.rows.row import STATE_VERSION
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock, SeededRng


class Last(Computation):
    def process_record(self, context, record):
        context.state.get()
        context.state.set(record.at)


class LastIn(Last):
    """The same state in MessagePack, with a version."""

    state_version = 1
    codec = MsgpackCodec()
    codecs = {0: JsonCodec()}  # noqa: RUF012 - as in user code

    def upgrade_state(self, state: Any, version: int) -> Any:
        return state


class Without(Last):
    """A version without an upgrade."""

    state_version = 1


class Forgetful(LastIn):
    """An upgrade in place that forgets to return the state."""

    codec = JsonCodec()
    codecs = {}  # noqa: RUF012

    def upgrade_state(self, state: Any, version: int) -> Any:
        return None


class Pond:
    """A store in memory, and pipelines that run on it in turn."""

    def __init__(self) -> None:
        self.objects, self.registry = MemoryObjects(), MemoryRegistry()
        self.clock, self.rng = ManualClock(), SeededRng(7)

    def store(self) -> Store:
        return Store.in_memory(objects=self.objects, registry=self.registry, clock=self.clock, rng=self.rng)

    def start(self, computation: Computation, pipeline: str = "p", name: str = "c", **options: Any) -> Any:
        graph = EnginePipeline(pipeline, drop=options.pop("drop", ()))
        graph.inject("in", key="k", at="t").apply(computation, name=name, **options)
        runner = LocalRunner(self.store(), clock=self.clock, rng=self.rng, progress=False, intervals=1)
        return runner.start(graph, stepping=True)

    def run(self, computation: Computation, *keys: str, **options: Any) -> Snapshot:
        with self.start(computation, **options) as run:
            if keys:
                run.inject("in", [{"k": key, "t": 1} for key in keys])
            run.run_until_quiet()
        return load(Log(self.objects))

    def columns(self) -> list[str]:
        metadata = load(Log(self.objects)).metadata
        assert metadata is not None
        return [field["name"] for field in orjson.loads(metadata.schema_string)["fields"]]


@pytest.fixture
def old_pond(monkeypatch: pytest.MonkeyPatch) -> Pond:
    """Make a store whose table lacks the column of versions."""
    pond = Pond()
    with monkeypatch.context() as patch:
        for name in ("ROW_SCHEMA", "_ROWS_SCHEMA"):
            schema = getattr(table, name)
            patch.setattr(table, name, schema.remove(schema.get_field_index(STATE_VERSION)))
        pond.run(Last(), "a")
    assert STATE_VERSION not in pond.columns()
    return pond


def test_rewind_reverts_version_and_codec():
    """Afterwards the former code runs again, and the newer code upgrades once more."""
    pond = Pond()
    before = pond.run(Last(), "a", "b")
    pond.run(LastIn(), "a")
    with pytest.raises(InvalidError, match="newer code"):
        pond.run(Last())
    leases = MemoryLeases(pond.registry, pond.clock, writer_id="r")
    repair_store(
        pond.objects, plan_rewind(pond.objects, before.version, None), leases, pond.clock, SeededRng(9)
    )

    assert stored_state_version(load(Log(pond.objects)).txns, "c") == 0
    pond.run(Last(), "a")
    after = pond.run(LastIn(), "b")
    assert stored_state_version(after.txns, "c") == 1


def test_old_table_gets_the_version_column_with_the_first_version(old_pond: Pond):
    old_pond.run(Last(), "a")
    assert STATE_VERSION not in old_pond.columns()

    old_pond.run(LastIn(), "a")
    assert STATE_VERSION in old_pond.columns()
    assert old_pond.store().rows_view("c").to_arrow().column(STATE_VERSION).to_pylist() == [1]


def test_other_pipeline_commits_after_the_version_column_is_added(old_pond: Pond):
    """Its commit loses the race against the new column and must be repeated."""
    with old_pond.start(Last(), pipeline="q", name="other") as other:
        other.inject("in", [{"k": "x", "t": 1}])
        other.run_until_quiet()
        old_pond.run(LastIn(), "a")
        other.inject("in", [{"k": "x", "t": 2}])
        other.run_until_quiet()

    assert STATE_VERSION in old_pond.columns()
    assert old_pond.store().rows_view("other").to_arrow().column("state").to_pylist() == ["2"]


def test_version_without_an_upgrade_is_refused_for_older_rows():
    Pond().run(Without(), "a")
    pond = Pond()
    pond.run(Last(), "a")

    with pytest.raises(InvalidError, match=r"no upgrade_state.*stored=.0. state_version=.1"):
        pond.run(Without())


def test_changed_codec_without_a_version_is_refused():
    pond = Pond()
    pond.run(Last(), "a")
    packed = Last()
    packed.codec = MsgpackCodec()

    with pytest.raises(InvalidError, match="raise state_version and name it in codecs"):
        pond.run(packed)
    unexplained = LastIn()
    unexplained.codecs = {}
    with pytest.raises(InvalidError, match="another codec"):
        pond.run(unexplained)


def test_reused_name_starts_at_its_own_version():
    """The former computation of the name was dropped."""
    pond = Pond()
    pond.run(LastIn(), "a")
    pond.run(Last(), "a", name="d", drop=("c",))
    pond.run(Last(), "a", drop=("d",))

    assert stored_state_version(pond.run(Last(), "a").txns, "c") == 0


def test_pipeline_without_versions_records_none():
    txns = Pond().run(Last(), "a").txns

    assert not any(app_id.startswith(AppId.STATE_VERSION) for app_id in txns)


def test_upgrade_that_returns_none_is_refused():
    """A forgotten return would silently erase the state."""
    pond = Pond()
    pond.run(Last(), "a")

    with pytest.raises(InvalidError, match="returned None"):
        pond.run(Forgetful(), "a", on_error="stop")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"state_version": -1}, "state_version is a whole number"),
        ({"state_version": True}, "state_version is a whole number"),
        ({"state_version": "2"}, "state_version is a whole number"),
        ({"codecs": [JsonCodec()]}, "codecs must map"),
        ({"codecs": {0: JsonCodec()}}, "codecs must name versions earlier than state_version"),
        ({"state_version": 1, "codecs": {0: "json"}}, "each codec must be a Codec instance"),
        (
            {"codec": type("Mine", (Codec,), {"name": "mine", "is_text": True, "encode": str})()},
            "codec must define decode",
        ),
        ({"codec": type("Mine", (JsonCodec,), {"name": 5})()}, "name of a codec must be text"),
    ],
)
def test_invalid_versions_and_codecs_are_refused(attributes: dict[str, Any], message: str):
    computation = Last()
    for name, value in attributes.items():
        setattr(computation, name, value)
    with pytest.raises(InvalidError, match=message):
        EnginePipeline("p").inject("in", key="k", at="t").apply(computation, name="c")
