"""Scenarios: chosen seeds, from files, from lists, or one per failpoint."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import orjson

from millpond.testing.simulation.simulation import STEPS, SimulationOutcome, simulate
from millpond.testing.simulation.workload import Workload

_DEATH_STEPS: Final = 250
_DEATH_TRIES: Final = 24
"""Two in five seeds come to the rarest pairs: a checkpoint, and then a sink that is behind."""

_DEATH_FAULTS: Final = ("reply_lost", "outage", "restart", "eager_upkeep")
"""What it takes to come to every failpoint soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to simulate.

    Attributes:
        seed: the source of randomness.
        steps: number of steps with faults.
        kinds: kinds of faults; ``None`` lets the seed decide.
        deaths: failpoints at which processes die, one after another.
    """

    seed: int | str
    steps: int = STEPS
    kinds: tuple[str, ...] | None = None
    deaths: tuple[str, ...] = ()

    def command(self, workload: str, usual_workload: str) -> str:
        """The command that replays it."""
        words = ["python", "-m", "millpond.testing.simulate", "--seed", str(self.seed)]
        if self.steps != STEPS:
            words += ["--steps", str(self.steps)]
        if self.kinds is not None:
            words += ["--faults", ",".join(self.kinds) or "none"]
        if self.deaths:
            words += ["--deaths", ",".join(self.deaths)]
        if workload != usual_workload:
            words += ["--workload", workload]
        return shlex.join(words)

    def save(self, folder: Path, outcome: SimulationOutcome) -> Path:
        """Write it, with the violation, to a file that `saved_scenarios` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"seed-{str(self.seed).replace('/', '-')}.json"
        text = orjson.dumps({**asdict(self), "found": outcome.violation}, option=orjson.OPT_INDENT_2)
        path.write_bytes(text + b"\n")
        return path


def saved_scenarios(folder: Path) -> list[Scenario]:
    """The scenarios in a folder, ordered by file name."""
    scenarios = []
    for path in sorted(folder.glob("*.json")):
        fields = orjson.loads(path.read_bytes())
        fields.pop("found", None)
        kinds = fields.get("kinds")
        scenarios.append(
            Scenario(
                seed=fields["seed"],
                steps=fields.get("steps", STEPS),
                kinds=None if kinds is None else tuple(kinds),
                deaths=tuple(fields.get("deaths", ())),
            )
        )
    return scenarios


def deaths_at(failpoints: Iterable[str], *, variants: int = 1) -> list[Scenario]:
    """Scenarios in which a process dies at each failpoint, ``variants`` per failpoint."""
    return [_death((name,), f"death-{name}-{variant}") for name in failpoints for variant in range(variants)]


def pairs_of_deaths(failpoints: Iterable[str]) -> list[Scenario]:
    """Scenarios in which a process dies at one failpoint and its successor at another, or at the same."""
    names = list(failpoints)
    return [_death((name, other), f"deaths-{name}-{other}") for name in names for other in names]


def _death(deaths: tuple[str, ...], seed: str) -> Scenario:
    is_in_update = any(name.startswith("update.") for name in deaths)
    kinds = (*_DEATH_FAULTS, "pipeline_updated") if is_in_update else _DEATH_FAULTS
    return Scenario(seed=seed, steps=_DEATH_STEPS, kinds=kinds, deaths=deaths)


def play(scenario: Scenario, make_workload: Callable[[], Workload]) -> SimulationOutcome:
    """Simulate a scenario; if a planned death is not reached, retry with other seeds, a bounded number of times."""
    outcome = _once(scenario, make_workload)
    for number in range(1, _DEATH_TRIES):
        if outcome.violation or not outcome.deaths_left:
            break
        outcome = _once(replace(scenario, seed=f"{scenario.seed}+{number}"), make_workload)
    return outcome


def _once(scenario: Scenario, make_workload: Callable[[], Workload]) -> SimulationOutcome:
    return simulate(
        scenario.seed,
        make_workload,
        steps=scenario.steps,
        kinds=scenario.kinds,
        deaths=scenario.deaths,
    )
