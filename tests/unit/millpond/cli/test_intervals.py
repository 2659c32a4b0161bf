"""``millpond intervals``: what it shows of a store whose keys are cut, and what it asks for."""

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
    """Counts a key's records."""

    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)


def pipeline() -> mp.Pipeline:
    made = mp.Pipeline("p")
    made.inject("in", key="k", at="at").apply(Count(), name="count")
    return made


@pytest.fixture(scope="module")
def pond(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for tests that change nothing."""
    return made(tmp_path_factory.mktemp("cut") / "pond")


def made(folder: Path) -> Path:
    """A store whose keys were split while the pipeline ran, and which balances its load."""
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


def test_it_shows_what_each_interval_has(pond: Path) -> None:
    """Bounds, rows and bytes of its own files, shared files, load, and who holds it."""
    shown = [json.loads(line) for line in invoke(pond, "--json").stdout.splitlines()]

    assert [(entry["low"], entry["high"]) for entry in shown] == [("", "m"), ("m", None)]
    assert [entry["row_updates"] for entry in shown] == [2, 4]
    assert [entry["records"] for entry in shown] == [1, 2]
    assert all(entry["shared_files"] == 1 and entry["size_bytes"] > 0 for entry in shown)
    assert all(entry["work_ms"] > 0 and entry["owner"] and entry["sequencer"] for entry in shown)
    table = invoke(pond)
    assert table.exit_code == 0
    assert "count" in table.stdout


def test_a_cut_by_hand_waits_for_the_pipeline(tmp_path: Path) -> None:
    """It is shown as waiting, and made when the pipeline runs again."""
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
def test_a_cut_that_makes_no_sense_is_refused(pond: Path, arguments: tuple[str, ...], said: str) -> None:
    """With the bounds or names that there are."""
    refused = invoke(pond, *arguments)

    assert refused.exit_code != 0
    assert said in str(refused.exception) + refused.output
