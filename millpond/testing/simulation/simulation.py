"""A simulation: one seed, from an empty disk to a quiescent end.

The safety phase: actors and faults take turns at random. The liveness phase: no more faults, and
everything must drain (I12). Finally everything is compared with the records that were sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy
from millpond.statestore.failpoint import listening
from millpond.statestore.rows.files import PARQUET
from millpond.statestore.rows.row_format import IpcRowFormat
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.line import RETENTION_MS, Line
from millpond.testing.simulation.operators import Operators
from millpond.testing.simulation.process import Settings
from millpond.testing.simulation.publisher import ID_SLACK_MS, ID_SLACK_MS_LATE
from millpond.testing.simulation.versions.forks import Forks
from millpond.testing.simulation.versions.versions import Versions
from millpond.testing.simulation.violation import Violation
from millpond.testing.simulation.workload import Workload
from millpond.testing.simulation.world import World

STEPS: Final = 300
"""Steps of the safety phase, unless said otherwise."""

_PARQUET: Final = 0.05
_WEIGHTS: Final = {"turn": 1.0, "publish": 3.0, "promise": 1.5, "time": 4.0, "nemesis": 3.0, "read": 0.08}
_TURN_OF_THE_DOOMED: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """The outcome of a seed.

    Attributes:
        seed: the seed.
        violation: the broken promise in words; empty if all held.
        promise: the number of the broken promise.
        trace_hash: hash over the trace.
        events: number of events in the trace.
        supersteps: number of committed supersteps.
        kinds: kinds of faults that were enabled.
        struck: number of faults by kind.
        failpoints: number of passes by failpoint.
        processes: number of processes started.
        simulated_s: seconds of the world's time.
        deaths_left: planned deaths whose failpoint no process reached.
        tail: the last events, if a promise was broken.
    """

    seed: int | str
    violation: str = ""
    promise: str = ""
    trace_hash: str = ""
    events: int = 0
    supersteps: int = 0
    kinds: tuple[str, ...] = ()
    struck: dict[str, int] = field(default_factory=dict)
    failpoints: dict[str, int] = field(default_factory=dict)
    processes: int = 0
    simulated_s: float = 0.0
    deaths_left: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()


class Simulation:
    """A world with its store and the forks of it.

    Args:
        seed: the source of randomness.
        workload: the workload to run.
        steps: steps of the safety phase.
        kinds: kinds of faults to enable; ``None`` lets the seed decide.
        deaths: failpoints at which processes die, one after another.
    """

    def __init__(
        self,
        seed: int | str,
        workload: Workload,
        *,
        steps: int = STEPS,
        kinds: Iterable[str] | None = None,
        deaths: Iterable[str] = (),
    ) -> None:
        self.world: World = World(seed, kinds, deaths)
        workload.has_late_records = workload.takes_late_records and self.world.swarm.knows("fast_clock")
        workload.begin(Draw(f"{seed}/workload"))
        self._steps = steps
        self._workload = workload
        settings = self._draw_settings()
        self.line: Line = Line(self.world, workload, workload.pipeline().check(), settings)
        self._operators = Operators(self.world, workload, settings.row_format)
        self._forks = Forks(self.line, self._operators)
        self._versions = Versions(self.line, self._forks)
        self.world.all_die = self._all_die

    def run(self) -> SimulationOutcome:
        """Run all phases."""
        world = self.world
        with listening(world.reached):
            try:
                self._safety()
                self._peace()
            except Violation as violation:
                world.violations.append(violation)
        # Report the first violation: later ones may be its consequences.
        first = world.violations[0] if world.violations else None
        text, promise = (str(first), first.promise) if first else ("", "")
        return SimulationOutcome(
            seed=world.seed,
            violation=text,
            promise=promise,
            trace_hash=world.trace.digest,
            events=world.trace.events,
            supersteps=self.line.auditor.kinds.get("superstep", 0),
            kinds=world.swarm.kinds,
            struck=dict(world.swarm.struck),
            failpoints=dict(world.failpoints),
            processes=len(self.line.processes) + self._forks.processes,
            simulated_s=(world.now_us - self.line.auditor.landed_us.get(0, world.now_us)) / 1e6,
            deaths_left=tuple(world.deaths),
            tail=tuple(world.trace.last) if text else (),
        )

    def _draw_settings(self) -> Settings:
        world = self.world
        draw, knows = world.draw, world.swarm.knows
        world.swarm.struck.update(kind for kind in ("no_cache", "eager_upkeep") if knows(kind))
        fan_in = 2 if knows("eager_upkeep") else draw.choice((5, 8))
        upkeep = UpkeepPolicy(
            compaction=CompactionPolicy(fan_in=fan_in, files_max=8),
            retention=0 if knows("eager_upkeep") else f"{RETENTION_MS}ms",
            collect_every=8 if knows("eager_upkeep") else 24,
        )
        return Settings(
            intervals=draw.choice((1, 1, 2)),
            upkeep=upkeep,
            cache_mib=0 if knows("no_cache") else 1,
            pause_timeout=draw.choice(("300ms", "60s")),
            # Parquet would double the cost, and its encoding is tested on files, not on schedules.
            row_format=PARQUET if Draw(f"{world.seed}/format").chance(_PARQUET) else IpcRowFormat(),
            id_slack_ms=ID_SLACK_MS_LATE if self._workload.has_late_records else ID_SLACK_MS,
        )

    # -- the safety phase ------------------------------------------------------------------

    def _safety(self) -> None:
        # A process with a planned death must get to its failpoint.
        weights = _WEIGHTS | ({"turn": _TURN_OF_THE_DOOMED} if self.world.deaths_planned else {})
        for _ in range(self._steps):
            if self.world.deaths_planned and not self.world.deaths:
                return
            self.line.step(weights)
            self._operators.act()
            self._versions.act()
            self._forks.act(_WEIGHTS)

    def _all_die(self, how: str) -> None:
        self.line.all_die(how)
        self._forks.all_die(how)

    # -- the liveness phase ----------------------------------------------------------------

    def _peace(self) -> None:
        """Faults are over: everything drains, and is compared with the sent records; forks before their original or after."""
        self._versions.check()
        if self._forks.end_first:
            self._forks.end()
        self.line.liveness()
        self._versions.check()
        self.line.end()
        if not self._forks.end_first:
            self._forks.end()


def simulate(
    seed: int | str,
    make_workload: Callable[[], Workload],
    *,
    steps: int = STEPS,
    kinds: Sequence[str] | None = None,
    deaths: Sequence[str] = (),
) -> SimulationOutcome:
    """Run one seed.

    Args:
        seed: the source of randomness; the same seed gives the same run, event by event.
        make_workload: creates a workload.
        steps: steps of the safety phase.
        kinds: kinds of faults to enable; ``None`` lets the seed decide, see `FAULTS`.
        deaths: failpoints at which processes die, one after another.

    Example:
        >>> from millpond.testing.simulation.bank import Bank
        >>> simulate(1, Bank, steps=20, kinds=["crash"]).violation
        ''
    """
    return Simulation(seed, make_workload(), steps=steps, kinds=kinds, deaths=deaths).run()
