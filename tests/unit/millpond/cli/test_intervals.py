"""``millpond intervals``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import millpond as mp
from millpond.cli.main import main
from millpond.executor.ownership.cuts import Cut, waiting_requests
from millpond.statestore.interval import Interval


class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


def pipeline() -> mp.Pipeline:
    made = mp.Pipeline("p")
    made.inject("in", key="k", at="at").apply(Count(), name="count")
    return made


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("cut") / "pond")


def made(folder: Path) -> Path:
    runner = mp.LocalRunner(folder, progress=False, balance=mp.BalancePolicy(every=1, least_work="1000s"))
    run = runner.start(pipeline(), stepping=True)
    for at in range(3):
        run.inject("in", [{"k": key, "at": at} for key in "axz"])
        run.run_until_quiet()
        if not at:
            run._worker.coordinator.recut(Cut.split(Interval("count"), ["m"]))
    run.stop()
    return folder


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["intervals", *map(str, arguments)])


def test_interval_is_shown_with_rows_load_and_owner(pond: Path) -> None:
    shown = [json.loads(line) for line in invoke(pond, "--json").stdout.splitlines()]

    assert [(entry["low"], entry["high"]) for entry in shown] == [("", "m"), ("m", None)]
    assert [entry["row_updates"] for entry in shown] == [2, 4]
    assert [entry["records"] for entry in shown] == [1, 2]
    assert all(entry["shared_files"] == 1 and entry["size_bytes"] > 0 for entry in shown)
    assert all(entry["work_ms"] > 0 and entry["owner"] and entry["sequencer"] for entry in shown)
    table = invoke(pond)
    assert table.exit_code == 0
    assert "count" in table.stdout


def test_requested_cut_waits_for_pipeline(tmp_path: Path) -> None:
    pond = made(tmp_path / "pond")
    assert "asked for: split count at x" in invoke(pond, "--split", "count", "x").stdout
    assert "waits for the pipeline: split count x" in invoke(pond).output

    run = mp.LocalRunner(pond, progress=False).start(pipeline(), stepping=True)
    run.inject("in", [{"k": "a", "at": 9}])
    run.run_until_quiet()
    lows = [interval.low for interval in run._worker.coordinator.intervals_of("count")]
    run.stop()

    assert lows == ["", "m", "x"]
    with mp.Store.open(pond, read_only=True) as store:
        assert not waiting_requests(store.snapshot().txns)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--split", "count", "m"), "begins at this key already"),
        (("--merge", "count", "c"), "no two intervals meet"),
        (("--split", "cuont", "c"), "no computation of this name"),
        (("--split", "dead_letters", "c"), "no computation of this name"),
    ],
)
def test_impossible_cut_is_refused_with_known_bounds(
    pond: Path, arguments: tuple[str, ...], said: str
) -> None:
    refused = invoke(pond, *arguments)

    assert refused.exit_code != 0
    assert said in str(refused.exception) + refused.output
