"""``millpond history --topology``."""

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
    def __init__(self, by: int = 1) -> None:
        self.by = by

    def process_record(self, context: Any, record: Any) -> None:
        context.state.set(context.state.get(0) + self.by)


def pipeline(
    folder: Path, *names: str, by: int = 1, sinks: Sequence[str] = (), retire: Sequence[str] = ()
) -> mp.Pipeline:
    made = mp.Pipeline("p", retire=retire)
    made.inject("in", key="k", at="at")
    for name in names:
        made.add(Add(by), name=name, subscribes={"in": None}, produces=[f"{name}_out"])
    for sink in sinks:
        made.add_sink(sink, f"{names[0]}_out", mp.DeltaSink(str(folder / sink)))
    return made


@pytest.fixture
def pond(tmp_path: Path) -> Path:
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
    result = CliRunner().invoke(main, ["history", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_topology_is_shown_once_with_its_changes(pond: Path) -> None:
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


def test_versions_are_those_of_start_and_update_commits(pond: Path) -> None:
    """A start records its topology in the fence."""
    kinds = {entry["version"]: entry["what"] for entry in lines(pond, "--limit", "100")}

    assert [kinds[one["version"]] for one in lines(pond, "--topology")] == ["fence", "topology", "topology"]


def test_catalog_follows_updates(pond: Path) -> None:
    """A computation that is declared again is not retired."""
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


def test_table_marks_changes_and_has_limit(pond: Path) -> None:
    result = CliRunner().invoke(main, ["history", str(pond), "--topology", "--limit", "2"])

    assert result.exit_code == 0
    for mark in ("~a", "-b", "+b", "+more (sink)", "-out (sink)"):
        assert mark in result.stdout
    assert "start" not in result.stdout
