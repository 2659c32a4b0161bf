"""``millpond history --topology``: which version had which computations, sinks and code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import millpond as mp
from millpond.cli.main import main
from millpond.statestore.system import SystemClock


class Add(mp.Computation):
    """Adds a number for each record."""

    def __init__(self, by: int = 1) -> None:
        self.by = by

    def process_record(self, context: Any, record: Any) -> None:
        """Add."""
        context.state.set(context.state.get(0) + self.by)


def pipeline(
    folder: Path, *names: str, by: int = 1, sinks: Sequence[str] = (), retire: Sequence[str] = ()
) -> mp.Pipeline:
    """Computations that read one stream, and sinks of the first one's."""
    made = mp.Pipeline("p", retire=retire)
    made.inject("in", key="k", at="at")
    for name in names:
        made.add(Add(by), name=name, subscribes={"in": None}, produces=[f"{name}_out"])
    for sink in sinks:
        made.add_sink(sink, f"{names[0]}_out", mp.DeltaSink(str(folder / sink)))
    return made


@pytest.fixture
def pond(tmp_path: Path) -> Path:
    """A store whose pipeline was started, started again, and updated twice."""
    registry, clock, folder = mp.testing.MemoryRegistry(), SystemClock(), tmp_path / "pond"

    def opened() -> mp.Store:
        return mp.Store.open(
            folder, leases=lambda _, writer_id: mp.testing.MemoryLeases(registry, clock, writer_id=writer_id)
        )

    first = pipeline(tmp_path, "a", "b", sinks=["out"])
    with opened() as store, mp.LocalRunner(store, progress=False).start(first, stepping=True) as run:
        run.inject_durably("in", [{"k": "k", "at": 1}])
    with opened() as store, mp.LocalRunner(store, progress=False).start(first, stepping=True) as run:
        run.update(pipeline(tmp_path, "a", by=2, sinks=["out", "more"], retire=["b"]))
        run.update(pipeline(tmp_path, "a", "b", by=2))
    return folder


def lines(*arguments: str | Path) -> list[dict[str, Any]]:
    """What the command prints as JSON."""
    result = CliRunner().invoke(main, ["history", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_each_topology_is_told_once_with_what_it_changed(pond: Path) -> None:
    """A start with the same pipeline is no other topology."""
    told = lines(pond, "--topology")

    assert [one["by"] for one in told] == ["start", "update", "update"]
    assert [[node["name"] for node in one["computations"]] for one in told] == [["a", "b"], ["a"], ["a", "b"]]
    assert [[sink["name"] for sink in one["sinks"]] for one in told] == [["out"], ["out", "more"], []]
    nothing: dict[str, list[str]] = {name: [] for name in asdict(mp.types.TopologyChange())}
    assert [one["change"] for one in told] == [
        {**nothing, "added": ["a", "b"], "sinks_added": ["out"]},
        {**nothing, "removed": ["b"], "changed": ["a"], "sinks_added": ["more"]},
        {**nothing, "added": ["b"], "sinks_removed": ["more", "out"]},
    ]
    codes = [{node["name"]: node["code"] for node in one["computations"]} for one in told]
    assert codes[0]["a"] == codes[0]["b"] != codes[1]["a"] == codes[2]["a"] == codes[2]["b"]


def test_the_versions_are_those_of_the_commits_that_say_so(pond: Path) -> None:
    """An update is a commit of its own kind, and a start says it in its fence."""
    kinds = {entry["version"]: entry["what"] for entry in lines(pond, "--limit", "100")}

    assert [kinds[one["version"]] for one in lines(pond, "--topology")] == ["fence", "topology", "topology"]


def test_the_catalog_follows_updates(pond: Path) -> None:
    """It has a version of the code for each change, and no computation that is back counts as retired."""
    with mp.Store.open(
        pond,
        leases=lambda _, writer_id: mp.testing.MemoryLeases(
            mp.testing.MemoryRegistry(), SystemClock(), writer_id=writer_id
        ),
    ) as store:
        assert store.catalog is not None
        entries = {entry.name: entry for entry in store.catalog.computations()}
        codes = [version.code_hash for version in store.catalog.code_versions("a")]

    assert {name: entry.retired_us for name, entry in entries.items()} == {"a": None, "b": None}
    first, _, last = lines(pond, "--topology")
    assert codes == [first["computations"][0]["code"], last["computations"][0]["code"]]


def test_people_get_a_table(pond: Path) -> None:
    """With marks of what is new, gone and different, and the newest ones if there is a limit."""
    result = CliRunner().invoke(main, ["history", str(pond), "--topology", "--limit", "2"])

    assert result.exit_code == 0
    for mark in ("~a", "-b", "+b", "+more (sink)", "-out (sink)"):
        assert mark in result.stdout
    assert "start" not in result.stdout
