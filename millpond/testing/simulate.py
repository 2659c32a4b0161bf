"""Simulate the whole engine: ``python -m millpond.testing.simulate --seeds 2000`` (docs/safety.md).

A seed determines one simulated world: a single thread with its own time, disks, network and lease
service, some kinds of faults, and a workload whose every promise is checked at every commit. The
same seed gives the same run, event by event, so a failing run is replayed with ``--seed``.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import click
import orjson
import pyarrow as pa

from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import FAILPOINTS
from millpond.statestore.system import SystemClock
from millpond.testing.fixtures.count_progress import CountProgress
from millpond.testing.simulation.fault import FAULTS
from millpond.testing.simulation.scenario import Scenario, deaths_at, pairs_of_deaths, play
from millpond.testing.simulation.simulation import STEPS, SimulationOutcome
from millpond.testing.simulation.workload import Workload

_NOWHERE: Final = logging.NullHandler()
_BANK: Final = "millpond.testing.simulation.bank:Bank"
_TAIL: Final = 40
_ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(slots=True)
class Tally:
    """Totals over all seeds.

    Attributes:
        passed: seeds in which every promise held.
        failed: outcomes of the other seeds.
        unreached: scenarios of which no process reached the planned failpoints; they prove nothing.
        supersteps: supersteps committed.
        events: events in all traces.
        processes: processes started.
        simulated_s: seconds of simulated time.
        struck: number of faults by kind.
        failpoints: number of passes by failpoint.
    """

    passed: int = 0
    failed: list[SimulationOutcome] = field(default_factory=list)
    unreached: list[SimulationOutcome] = field(default_factory=list)
    supersteps: int = 0
    events: int = 0
    processes: int = 0
    simulated_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    failpoints: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: SimulationOutcome) -> None:
        """Add the outcome of a seed."""
        if outcome.violation:
            self.failed.append(outcome)
        elif outcome.deaths_left:
            self.unreached.append(outcome)
        else:
            self.passed += 1
        self.supersteps += outcome.supersteps
        self.events += outcome.events
        self.processes += outcome.processes
        self.simulated_s += outcome.simulated_s
        self.struck.update(outcome.struck)
        self.failpoints.update(outcome.failpoints)


def run_all(
    scenarios: Sequence[Scenario], workload: str = _BANK, *, workers: int = 1, fail_fast: bool = False
) -> Iterator[SimulationOutcome]:
    """Play scenarios in parallel, and yield their outcomes in the order of the scenarios.

    Args:
        scenarios: what to play.
        workload: ``module:Class``.
        workers: number of processes; 1 plays in this process.
        fail_fast: stop after the first violation.

    Raises:
        InvalidError: there is no such workload.
    """
    load_workload(workload)
    if workers == 1:
        yield from _until_failure(map(partial(_play, workload), scenarios), fail_fast=fail_fast)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(workload,)
    ) as pool:
        yield from _until_failure(
            pool.map(partial(_play_and_clean, workload), scenarios, chunksize=2), fail_fast=fail_fast
        )
        pool.shutdown(cancel_futures=True)


def _until_failure(outcomes: Iterable[SimulationOutcome], *, fail_fast: bool) -> Iterator[SimulationOutcome]:
    for outcome in outcomes:
        yield outcome
        if fail_fast and outcome.violation:
            return


def _play(workload: str, scenario: Scenario) -> SimulationOutcome:
    return play(scenario, load_workload(workload))


def load_workload(name: str) -> Callable[[], Workload]:
    """The class that ``module:Class`` names.

    Raises:
        InvalidError: there is no such class, or it is not a `Workload`.
    """
    module, _, attribute = name.partition(":")
    try:
        workload = getattr(importlib.import_module(module), attribute)  # named by the user
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidError("a workload is named module:Class", workload=name, reason=error) from error
    if not (isinstance(workload, type) and issubclass(workload, Workload)):
        raise InvalidError("a workload must be a subclass of Workload", workload=name)
    return workload


def quieten() -> None:
    """Silence the engine's log of expected faults, and limit libraries to one thread."""
    logging.getLogger("millpond").addHandler(_NOWHERE)
    logging.getLogger("millpond").propagate = False
    pa.set_cpu_count(1)


def _begin_worker(workload: str) -> None:
    quieten()
    load_workload(workload)
    # A world becomes garbage as a whole when it ends; collecting in between costs a tenth of the time.
    gc.freeze()
    gc.disable()


def _play_and_clean(workload: str, scenario: Scenario) -> SimulationOutcome:
    outcome = _play(workload, scenario)
    gc.collect()
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """`quieten` for a block, and restore the previous settings."""
    logger, threads = logging.getLogger("millpond"), pa.cpu_count()
    propagated = logger.propagate
    quieten()
    try:
        yield
    finally:
        logger.removeHandler(_NOWHERE)
        logger.propagate = propagated
        pa.set_cpu_count(threads)


# ------------------------------------------------------------------------------ the command


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--seeds", type=click.IntRange(1), default=100, show_default=True, help="How many seeds.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=str, default=None, help="Replay this one and show how it ended.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Steps with faults.")
@click.option("--faults", default=None, help="Kinds of faults, by commas; 'none'; 'list' shows them all.")
@click.option(
    "--failpoints",
    type=click.Choice(["each", "exhaustive", "list"]),
    help="Let processes die at each failpoint; 'exhaustive': at each pair, one after the other.",
)
@click.option("--deaths", default=None, help="Failpoints at which processes die, in this order, by commas.")
@click.option("--plant", default=None, help="Find a planted bug, or 'all'; 'list' shows them.")
@click.option("--workload", default=_BANK, show_default=True, help="What is simulated: module:Class.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first broken promise.")
@click.option(
    "--workers", type=click.IntRange(1), default=None, help="Processes; one a processor by default."
)
@click.option("--save", type=click.Path(file_okay=False, path_type=Path), help="Folder for failing seeds.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Report file.")
def main(
    seeds: int,
    first: int,
    seed: str | None,
    steps: int,
    faults: str | None,
    failpoints: str | None,
    deaths: str | None,
    plant: str | None,
    workload: str,
    fail_fast: bool,
    workers: int | None,
    save: Path | None,
    json_path: Path | None,
) -> None:
    """Run the whole engine in one thread, from a seed, with faults, and check every promise.

    \b
    python -m millpond.testing.simulate --seeds 2000        many seeds, all processors
    python -m millpond.testing.simulate --seed 17           one seed again, event by event
    python -m millpond.testing.simulate --faults crash,late_landing
    python -m millpond.testing.simulate --failpoints exhaustive
    python -m millpond.testing.simulate --plant all         prove that planted bugs are found
    python -m millpond.testing.simulate --workload mymodule:MyWorkload

    Exits with code 1 if a promise was broken, or if no process reached a requested failpoint.
    """  # noqa: D301 - click's mark for text that keeps its lines
    click.get_current_context().with_resource(_quiet())
    if faults == "list" or failpoints == "list":
        _show_list(FAULTS if faults == "list" else FAILPOINTS)
        return
    if plant is not None:
        _find_planted(plant, workers or os.cpu_count() or 1)
        return
    kinds = None if faults is None else tuple(kind for kind in faults.split(",") if kind not in {"", "none"})
    try:
        if seed is not None:
            named = tuple((deaths or "").split(",")) if deaths else ()
            number = int(seed) if seed.isdigit() else seed
            chosen = Scenario(seed=number, steps=steps, kinds=kinds, deaths=named)
            sys.exit(_replay(chosen, workload))
        scenarios = _scenarios(failpoints, first=first, seeds=seeds, steps=steps, kinds=kinds)
        outcomes = run_all(
            scenarios,
            workload,
            workers=min(workers or os.cpu_count() or 1, len(scenarios)),
            fail_fast=fail_fast,
        )
        sys.exit(_run(scenarios, outcomes, workload, save, json_path))
    except InvalidError as error:
        raise click.ClickException(str(error)) from error


def _scenarios(
    failpoints: str | None, *, first: int, seeds: int, steps: int, kinds: tuple[str, ...] | None
) -> list[Scenario]:
    if failpoints == "each":
        return deaths_at(FAILPOINTS, variants=5)
    if failpoints == "exhaustive":
        return pairs_of_deaths(FAILPOINTS)
    return [Scenario(seed=number, steps=steps, kinds=kinds) for number in range(first, first + seeds)]


def _show_list(names: Any) -> None:
    for name, meaning in names.items():
        click.echo(f"{name:32} {meaning}")


def _find_planted(name: str, workers: int) -> None:
    script = _ROOT / "tests" / "planted" / "find.py"
    if not script.is_file():
        raise click.ClickException("planted bugs are part of the source tree, not of the installed package")
    words = [sys.executable, str(script), "--workers", str(workers), name]
    sys.exit(subprocess.run(words, check=False).returncode)  # noqa: S603


def _replay(scenario: Scenario, workload: str) -> int:
    outcome = play(scenario, load_workload(workload))
    if outcome.violation:
        click.echo("\n".join(outcome.tail[-_TAIL:]))
    click.echo(f"trace {outcome.trace_hash} over {outcome.events} events; faults: {_listed(outcome.kinds)}")
    click.echo(_line(outcome, scenario, workload))
    return 1 if outcome.violation else 0


def _line(outcome: SimulationOutcome, scenario: Scenario, workload: str) -> str:
    """One line: the seed, its outcome, the commit, and the command that replays it."""
    how = outcome.violation or "passed"
    return f"seed {outcome.seed}: {how} | commit {_commit()} | {scenario.command(workload, _BANK)}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _commit() -> str:
    completed = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - git, wherever it is
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return completed.stdout.strip() or "unknown"


def _run(
    scenarios: list[Scenario],
    outcomes: Iterable[SimulationOutcome],
    workload: str,
    save: Path | None,
    json_path: Path | None,
) -> int:
    clock = SystemClock()
    started_us = clock.monotonic_us()
    tally = Tally()
    with CountProgress("simulating", "seeds", len(scenarios), clock) as progress:
        for scenario, outcome in zip(scenarios, outcomes, strict=False):
            tally.add(outcome)
            progress.count(passed=not (outcome.violation or outcome.deaths_left))
            if outcome.violation:
                click.echo(_line(outcome, scenario, workload))
                if save is not None:
                    scenario.save(save, outcome)
    elapsed_s = (clock.monotonic_us() - started_us) / 1e6
    _report(tally, elapsed_s, json_path)
    return 1 if tally.failed or tally.unreached else 0


def _report(tally: Tally, elapsed_s: float, json_path: Path | None) -> None:
    played = tally.passed + len(tally.failed) + len(tally.unreached)
    for outcome in tally.unreached:
        click.echo(f"{outcome.seed}: no process reached {_listed(outcome.deaths_left)}")
    click.echo(
        f"{tally.supersteps:,} supersteps, {tally.processes:,} processes, {tally.events:,} events, "
        f"{tally.simulated_s / 3600:,.1f} simulated hours"
    )
    click.echo(
        f"faults: {sum(tally.struck.values()):,} of {len(tally.struck)} kinds (of {len(FAULTS)}); "
        f"failpoints: {sum(tally.failpoints.values()):,} at {len(tally.failpoints)} (of {len(FAILPOINTS)})"
    )
    click.echo(f"{played / elapsed_s:.2f} seeds per second, {elapsed_s:.0f} s")
    unreached = f", {len(tally.unreached)} unreached" if tally.unreached else ""
    click.echo(f"{tally.passed} passed, {len(tally.failed)} failed{unreached}")
    if json_path is not None:
        report = {
            "passed": tally.passed,
            "failed": [asdict(outcome) for outcome in tally.failed],
            "unreached": [outcome.seed for outcome in tally.unreached],
            "seconds": elapsed_s,
            "seeds_per_second": played / elapsed_s,
            "supersteps": tally.supersteps,
            "events": tally.events,
            "processes": tally.processes,
            "simulated_hours": tally.simulated_s / 3_600,
            "faults": dict(tally.struck),
            "failpoints": dict(tally.failpoints),
            "commit": _commit(),
        }
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
