"""The simulator: its seeds keep every promise, are reproducible, and find planted violations."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.statestore.failpoint import FAILPOINTS
from millpond.statestore.rows.files import PARQUET
from millpond.testing.simulate import Tally, _report, main, run_all
from millpond.testing.simulation.bank import Bank
from millpond.testing.simulation.fault import FAULTS
from millpond.testing.simulation.process import Settings, SimulatedProcess
from millpond.testing.simulation.scenario import (
    Scenario,
    deaths_at,
    pairs_of_deaths,
    play,
    saved_scenarios,
)
from millpond.testing.simulation.simulation import SimulationOutcome, simulate
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import End
from millpond.testing.simulation.world import World

pytestmark = pytest.mark.slow

_TWICE = 100
_TWICE_STEPS = 40
_SEEDS = Path(__file__).parent / "seeds"
_SETTINGS = Settings(
    intervals=1, upkeep=UpkeepPolicy(), cache_mib=1, pause_timeout="300ms", row_format=PARQUET
)
_SEED_COUNT = int(os.environ.get("SIMULATED_SEEDS", "8"))


class Canary(Bank):
    """A workload whose promise cannot hold."""

    def check_end(self, end: End) -> None:
        must(not end.sent, "I0", "nothing was ever sent")


@pytest.mark.parametrize("seed", range(_SEED_COUNT))
def test_every_promise_holds(seed: int) -> None:
    """A seed with its own faults must also have committed supersteps."""
    outcome = simulate(seed, Bank)

    assert outcome.violation == ""
    assert outcome.supersteps > 5


@pytest.mark.parametrize("scenario", saved_scenarios(_SEEDS), ids=lambda scenario: str(scenario.seed))
def test_former_failures_hold(scenario: Scenario) -> None:
    """Each seed once found a bug."""
    assert play(scenario, Bank).violation == ""


def test_same_seed_gives_the_same_run() -> None:
    """The runs are equal event by event, in this process and in another."""
    scenario = Scenario(seed=3, steps=120, kinds=("second_owner", "crash", "reply_lost", "message_delayed"))
    command = scenario.command("", "").split()[1:]
    completed = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    once = play(scenario, Bank)

    assert once.violation == ""
    assert once.events > 100
    assert play(scenario, Bank).trace_hash == once.trace_hash
    assert f"trace {once.trace_hash} over {once.events} events" in completed.stdout


def test_hundred_seeds_repeat_in_another_process() -> None:
    program = (
        "from millpond.testing.simulation.bank import Bank\n"
        "from millpond.testing.simulation.simulation import simulate\n"
        f"for seed in range({_TWICE}): print(simulate(seed, Bank, steps={_TWICE_STEPS}).trace_hash)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    ) as other:
        here = [simulate(seed, Bank, steps=_TWICE_STEPS).trace_hash for seed in range(_TWICE)]
        there = other.communicate()[0].split()

    assert here == there
    assert len(set(here)) == _TWICE


def test_different_seeds_give_different_runs() -> None:
    hashes = {simulate(seed, Bank, steps=20, kinds=[]).trace_hash for seed in range(3)}

    assert len(hashes) == 3


@pytest.mark.parametrize("scenario", deaths_at(FAILPOINTS, variants=5), ids=lambda scenario: scenario.seed)
def test_death_at_each_failpoint_keeps_every_promise(scenario: Scenario) -> None:
    """Five seeds each."""
    outcome = play(scenario, Bank)

    assert outcome.violation == ""
    assert outcome.deaths_left == ()


@pytest.mark.parametrize("scenario", pairs_of_deaths(FAILPOINTS)[7::193], ids=lambda s: "+".join(s.deaths))
def test_deaths_at_two_failpoints_keep_every_promise(scenario: Scenario) -> None:
    """The successor dies at the second."""
    outcome = play(scenario, Bank)

    assert outcome.violation == ""
    assert outcome.deaths_left == ()


def test_standby_of_a_live_owner_does_not_wait_indefinitely() -> None:
    """The standby is stopped, because an endless turn is a violation."""
    world = World(1, [])
    waiting = SimulatedProcess(world, "standby", Bank().pipeline, _SETTINGS, on_held="wait")
    owner = SimulatedProcess(world, "owner", Bank().pipeline, _SETTINGS)
    owner.turn()
    waiting.turn()

    assert "standby" in waiting.last_words
    assert owner.is_alive
    with pytest.raises(Violation, match="I12: a turn of owner does not end"):
        owner.clock.sleep_ms(3_700_000)


def test_canary_is_reported_with_seed_and_trace() -> None:
    outcome = simulate(1, Canary, steps=20, kinds=[])

    assert outcome.promise == "I0"
    assert "nothing was ever sent" in outcome.violation
    assert outcome.tail


class TestCommand:
    def test_last_line_counts_passed_and_failed_seeds(self, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        result = CliRunner().invoke(
            main, ["--seeds", "2", "--steps", "20", "--workers", "1", "--json", str(report)]
        )

        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[-1] == "2 passed, 0 failed"
        assert "seeds per second" in result.output
        assert '"passed": 2' in report.read_text()

    def test_violation_is_one_line_with_its_command(self, tmp_path: Path) -> None:
        workload = f"{__name__}:Canary"
        arguments = ["--seeds", "1", "--steps", "10", "--faults", "none", "--workload", workload]
        result = CliRunner().invoke(main, [*arguments, "--workers", "1", "--save", str(tmp_path)])

        assert result.exit_code == 1
        assert "seed 0: I0: nothing was ever sent | commit " in result.output
        assert f"--seed 0 --steps 10 --faults none --workload {workload}" in result.output
        assert saved_scenarios(tmp_path) == [Scenario(seed=0, steps=10, kinds=())]

    def test_unreached_failpoint_neither_passes_nor_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        outcome = SimulationOutcome(seed="deaths-a-b", deaths_left=("b",))
        tally = Tally()
        tally.add(outcome)
        _report(tally, 1.0, None)

        assert tally.passed == 0
        told = capsys.readouterr().out.splitlines()
        assert told[0] == "deaths-a-b: no process reached b"
        assert told[-1] == "0 passed, 0 failed, 1 unreached"

    def test_list_has_faults_and_failpoints(self) -> None:
        assert all(kind in CliRunner().invoke(main, ["--faults", "list"]).output for kind in FAULTS)
        assert all(name in CliRunner().invoke(main, ["--failpoints", "list"]).output for name in FAILPOINTS)

    @pytest.mark.parametrize("arguments", [["--faults", "rain"], ["--workload", "json:loads"]])
    def test_unknown_fault_or_invalid_workload_is_refused(self, arguments: list[str]) -> None:
        result = CliRunner().invoke(main, ["--seed", "1", *arguments])

        assert result.exit_code == 1
        assert arguments[1] in result.output


def test_run_all_keeps_the_order() -> None:
    """Several processes run the scenarios."""
    scenarios = [Scenario(seed=seed, steps=3, kinds=()) for seed in range(3)]

    assert [outcome.seed for outcome in run_all(scenarios, workers=2)] == [0, 1, 2]
