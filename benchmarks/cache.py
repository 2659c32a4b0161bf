"""The cost of each eviction policy, by the share of the state in memory (MillWheel §8.3, figure 16).

One interval's soft state runs five loads: the routes of the Zeitgeist demo's flights by hour, whose windows close a day
later; sessions of users; sliding windows; a Zipf load with timers; and a hot set that a scan of all keys interrupts.
Memory holds a part of all rows, and the policies choose it: keep none, evict the least recently used rows, evict the
rows that the engine expects to be used last, or, knowing the future, those used last (Belady's optimum). The routes and
sessions are also counted in windows of the library, where ``columns`` keeps the windows as columns of numbers.

    python -m benchmarks.cache --json build/bench/cache.json --picture docs/pictures/cache.png
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final
from unittest.mock import patch

import click
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from matplotlib.figure import Figure

from benchmarks.cache_loads import LOADS, Load, Step
from benchmarks.interval_processor import cpu_us
from benchmarks.json_result import tell_result
from benchmarks.pictures import STYLE
from millpond.executor.computation.values import ArrowValues
from millpond.executor.interval.bundle import Deliveries
from millpond.executor.interval.eviction import Candidates, EvictionPolicy, least_recently_used, window_aware
from millpond.executor.interval.row_cache import MemoryBudget
from millpond.executor.interval.row_reader import RowReader
from millpond.executor.interval.soft_state import SoftState
from millpond.executor.windows.windowed_computation import WindowedComputation
from millpond.gc.compaction import CompactionRules
from millpond.statestore.interval import Interval
from millpond.statestore.objects.ranges import MeteredObjects
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.types import TIME_MIN_US, Superstep, WallTimeMicros
from tests.fixtures.interval_run import IntervalRun

_INTERVAL: Final = Interval("rows")
_MIB: Final = 2**20
_SHARES: Final = (0.05, 0.1, 0.2, 0.5, 1.0)
_YOUNG_FILES: Final = 8
_ALL_FILES: Final = 64
_RULES: Final = CompactionRules(
    pending_from=Superstep(0), ids=IdRetention.of(TIME_MIN_US, WallTimeMicros(0), slack_us=0)
)


POLICIES: Final = ("none", "lru", "window_aware", "optimal")
"""Which rows are kept."""

COLUMNS: Final = "columns"
"""The policy ``window_aware`` where windows are not rows, but columns."""


class Future:
    """Which supersteps use a key, of a run that has been recorded."""

    def __init__(self) -> None:
        self._uses: dict[str, list[int]] = defaultdict(list)
        self.now: int = 0

    def record(self, keys: Iterable[str]) -> None:
        """Note that a superstep uses these keys."""
        for key in keys:
            self._uses[key].append(self.now)

    def policy(self, candidates: Candidates) -> npt.NDArray[np.intp]:
        """Evict those rows first that are used last, or never again."""
        return np.argsort(-np.array([self._next(key) for key in candidates.keys], np.float64), kind="stable")

    def _next(self, key: str) -> float:
        uses = self._uses.get(str(key), ())
        place = bisect_right(uses, self.now)
        return uses[place] if place < len(uses) else float("inf")


class _CountingReader(RowReader):
    """Counts the rows that are read because they are not in memory."""

    def __init__(self, objects: MeteredObjects) -> None:
        super().__init__(objects)
        self.misses = 0

    def read(
        self,
        paths: Sequence[str],
        columns: Sequence[str],
        *,
        keys: Iterable[str] | None = None,
        interval: Interval | None = None,
        large: Collection[str] = (),
        keep: Callable[[pa.Table], pa.Table] | None = None,
    ) -> pa.Table:
        """Read, and count."""
        wanted = None if keys is None else list(keys)
        self.misses += len(wanted or ())
        return super().read(paths, columns, keys=wanted, interval=interval, large=large, keep=keep)


class _CountingState(SoftState):
    """Counts the rows that supersteps use, and passes them to a `Future`."""

    future: Future | None = None
    used = 0
    seen: set[str]

    def load(self, keys: Sequence[str]) -> list[Any]:
        """Load, and count the keys that have had a row before."""
        self.used += sum(key in self.seen for key in keys)
        self.seen.update(keys)
        if self.future is not None:
            self.future.record(keys)
        return super().load(keys)


@dataclass(frozen=True, slots=True)
class _Outcome:
    used: int
    misses: int
    read_bytes: int
    latencies_us: Sequence[float]
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run with all rows in memory shows of a load.

    Attributes:
        future: which supersteps use which rows.
        state_bytes: what all rows take in memory.
    """

    future: Future
    state_bytes: int


def record(load: Load, *, steps_max: int | None = None) -> Recorded:
    """Run a load with all rows in memory."""
    future = Future()
    whole = _run(load, least_recently_used, None, future, steps_max, records=True)
    return Recorded(future, whole.state_bytes)


def run_once(
    load: Load, recorded: Recorded, policy: str, memory_share: float, *, steps_max: int | None = None
) -> dict[str, Any]:
    """Run a load with so much of its state in memory."""
    policies: Mapping[str, EvictionPolicy] = {
        "none": least_recently_used,
        "lru": least_recently_used,
        "window_aware": window_aware,
        "optimal": recorded.future.policy,
        COLUMNS: window_aware,
    }
    share = 0.0 if policy == "none" else memory_share
    budget = int(recorded.state_bytes * share)
    in_columns = policy == COLUMNS
    outcome = _run(load, policies[policy], budget, recorded.future, steps_max, in_columns=in_columns)
    return {
        "load": load.name,
        "policy": policy,
        "memory_share": share,
        "hit_rate": round(1 - outcome.misses / max(outcome.used, 1), 4),
        "misses": outcome.misses,
        "cpu_s": round(sum(outcome.latencies_us) / 1e6, 3),
        "mib_read": round(outcome.read_bytes / _MIB, 2),
        "ms": round(median(outcome.latencies_us) / 1_000, 2),
    }


def _run(
    load: Load,
    policy: EvictionPolicy,
    budget: int | None,
    future: Future,
    steps_max: int | None,
    *,
    records: bool = False,
    in_columns: bool = False,
) -> _Outcome:
    with nullcontext() if in_columns else patch.object(WindowedComputation, "column_rows", lambda *_: None):
        run = IntervalRun(load.node(), _INTERVAL)
        objects = MeteredObjects(run.objects)
        reader = _CountingReader(objects)
        memory = MemoryBudget(2**40 if budget is None else budget)
        state = _CountingState(_INTERVAL, reader, memory, policy=policy)
        state.seen, state.future = set(), future if records else None
        run.replace_soft_state(0, state)
    latencies: list[float] = []
    state_bytes = 0
    for number, step in enumerate(load.steps()):
        if number == steps_max:
            break
        future.now = number
        started = cpu_us()
        run.step([_deliveries(step)], watermark=step.watermark)
        latencies.append(cpu_us() - started)
        state_bytes = max(state_bytes, state.used_bytes)
        _compact(run, number)
    return _Outcome(
        used=state.used,
        misses=reader.misses,
        read_bytes=objects.read_bytes,
        latencies_us=latencies,
        state_bytes=state_bytes,
    )


def _compact(run: IntervalRun, number: int) -> None:
    """Compact as a pipeline does next to its supersteps: their time does not count."""
    if number % _ALL_FILES == _ALL_FILES - 1:
        run.compact(_RULES, last=-1)
    elif len(run.files) > _YOUNG_FILES:
        run.compact(_RULES, first=1, last=-1)


def _deliveries(step: Step) -> Deliveries:
    empty = pa.table({"n": pa.array(np.zeros(len(step.at), np.int64))})
    return Deliveries(
        stream="in", keys=pa.array(step.keys, pa.string()), at=step.at, values=ArrowValues(empty)
    )


def measure(
    loads: Sequence[str] = tuple(LOADS),
    shares: Sequence[float] = _SHARES,
    *,
    steps_max: int | None = None,
    tell: Callable[[Mapping[str, Any]], None] = lambda run: None,
) -> list[dict[str, Any]]:
    """Measure each load with each policy and share of memory."""
    runs: list[dict[str, Any]] = []
    for name in loads:
        load = LOADS[name]
        recorded = record(load, steps_max=steps_max)
        for policy in POLICIES if load.window_fn is None else (*POLICIES, COLUMNS):
            for share in shares[:1] if policy == "none" else shares:
                runs.append(run_once(load, recorded, policy, share, steps_max=steps_max))
                tell(runs[-1])
    return runs


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw processor time and misses over the share of the state that is in memory, a column for each load."""
    loads = list(dict.fromkeys(run["load"] for run in runs))
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(2.6 * len(loads), 4.6), layout="constrained")
        rows = figure.subplots(2, len(loads), sharex=True, squeeze=False)
        for column, load in enumerate(loads):
            none = next(run for run in runs if run["load"] == load and run["policy"] == "none")
            for axes, figure_name in ((rows[0][column], "cpu_s"), (rows[1][column], "misses")):
                for policy in (*POLICIES[1:], COLUMNS):
                    chosen = [run for run in runs if run["load"] == load and run["policy"] == policy]
                    if not chosen:
                        continue
                    points = [(0.0, 1.0)] + [
                        (run["memory_share"], run[figure_name] / max(none[figure_name], 1e-9))
                        for run in chosen
                    ]
                    axes.plot(
                        *zip(*points, strict=True),
                        marker="o",
                        markersize=3,
                        linewidth=1.3,
                        linestyle="--" if policy == "optimal" else "-",
                        color={"lru": "C1", "window_aware": "C0", "optimal": "0.5", COLUMNS: "C2"}[policy],
                        label=policy.replace("_", "-"),
                    )
                axes.set(ylim=(0, 1.05))
            rows[0][column].set_title(load)
            rows[1][column].set_xlabel("share of the state in memory")
        rows[0][0].set_ylabel("processor time")
        rows[1][0].set_ylabel("rows read")
        rows[0][-1].legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def _shares(_context: click.Context, _option: click.Parameter, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter("give shares with commas between them") from None


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw them there.")
@click.option("--load", "loads", type=click.Choice(list(LOADS)), multiple=True, default=tuple(LOADS))
@click.option(
    "--steps",
    "steps_max",
    type=click.IntRange(1),
    help="Run so many supersteps of each load; all by default.",
)
@click.option("--shares", default="0.05,0.1,0.2,0.5,1", callback=_shares, show_default=True)
def main(
    path: Path | None,
    picture: Path | None,
    loads: tuple[str, ...],
    steps_max: int | None,
    shares: list[float],
) -> None:
    """Measure, print, draw."""
    runs = measure(loads, shares, steps_max=steps_max, tell=lambda run: click.echo(f"{run}", err=True))
    tell_result({"runs": runs}, path, indent=2)
    if picture is not None:
        draw(runs, picture)


if __name__ == "__main__":
    main()
