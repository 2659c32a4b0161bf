"""Replay: the input of a past run again, through the same or other code, from an older version of its store on.

A replay works on a fork (docs/design/013-replay-and-diff.md): the original is only read, and its sinks are left alone.
By default it repeats the supersteps of the original one by one, as its commits recorded them. So the same code comes
to the same rows, timers and sinks, and what differs is what other code made different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millpond.executor.local.bounded import consume_inputs, observe_rows
from millpond.executor.local.row_source import RowSource, source_of
from millpond.executor.local.rows import RowsLike
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.replay.beginning import begin_replay, with_own_sinks
from millpond.executor.replay.clock import ReplayClock
from millpond.executor.replay.plan import ReplayPlan
from millpond.executor.replay.repetition import repeat_supersteps
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng

_CHECKED_ROWS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What was replayed.

    Attributes:
        version: the version of the original that the replay began with.
        until: the version of the original that it went up to.
        supersteps: how many supersteps of the original lie between them; 0 if they were not repeated one by one.
        records: how many records the computations have processed in this call.
        newest: the newest version of the replay's store.
    """

    version: int
    until: int
    supersteps: int
    records: int
    newest: int


def replay(
    store: Store,
    path: str | Path,
    pipeline: EnginePipeline,
    inputs: Mapping[str, RowsLike],
    *,
    version: int,
    until: int | None = None,
    recorded: bool = True,
    since_version: bool = False,
    zookeeper: str | None = None,
    cache_mib: int = 512,
    progress: bool = False,
    clock: Clock | None = None,
    rng: Rng | None = None,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Replayed:
    """Run a pipeline over the input of a past run, on a fork that begins with an older version.

    The original is only read, and may run meanwhile. Each sink of the replay is a table ``sinks/NAME`` in its own
    folder, which begins with what the original had delivered by that version. A replay that was killed goes on when it
    is called again with the same arguments. `compare_stores` says what differs.

    Args:
        store: the original; read-only is enough.
        path: where the replay's store is to lie: a folder that is empty or not there, or a URL.
        pipeline: the same code or other code, under the same pipeline name.
        inputs: by injected stream, what the original was given, in the order in which it was given: rows as
            `LocalRunner.run` takes them.
        version: the version of the original to begin with.
        until: the version up to which the original's input is replayed; its newest by default.
        recorded: whether the supersteps are those of the original: with the same rows, at the same wall time, under
            the same watermarks of its inputs, whatever the new code says of these. If not, the rows are given to the
            code in one `LocalRunner.run`, which ends the input where the original had ended it.
        since_version: whether the inputs begin with the first row that the version had not consumed. If not, they
            begin with the first row of all.
        zookeeper: ``host:port,…`` of an ensemble for the replay's store; ``None`` runs a server next to it.
        cache_mib: soft-state budget, in MiB.
        progress: show a progress line and log supersteps.
        clock: the machine's clock.
        rng: the source of names.
        told: called after each superstep, with how many are done and how many there are.

    Raises:
        InvalidError: there is no such version, the pipeline has another name, the inputs have fewer rows than the
            original consumed, its log does not say how it consumed them, or there is something else at the path.
        ConflictError: the version has been collected.
        DataError: bytes of the store are missing or wrong.
        UnavailableError: a store or ZooKeeper cannot be reached.

    Example::

        with mp.Store.open("pond", read_only=True) as store:
            mp.replay(store, "what_if", pipeline, {"payments": rows}, version=120)
    """
    clock, rng = clock or SystemClock(), rng or SystemRng()
    plan = begin_replay(store, path, pipeline, version, until, recorded=recorded, clock=clock, rng=rng)
    began = plan.supersteps[0].conditions.wall_time if plan.supersteps else clock.now_us()
    wall = ReplayClock(clock, began) if recorded else None
    with Store.open(
        path, zookeeper, storage_options=store.storage_options, clock=clock, rng=rng, create=False
    ) as fork:
        runner = LocalRunner(
            fork, cache_mib=cache_mib, progress=progress, dead_letter_limit=None, clock=wall or clock, rng=rng
        )
        own = with_own_sinks(pipeline, fork, clock, rng)
        with runner.start(own, stepping=True) as run:
            given = {stream: source_of(rows) for stream, rows in run.read_inputs(inputs).items()}
            parts = plan.parts(run.topology, given, since_version=since_version)
            for stream, part in parts.items():
                run.check_rows(stream, part.first(_CHECKED_ROWS))
            if run.backfilled and recorded:
                raise InvalidError(
                    "the supersteps of the original have no room for a backfill: begin without it, or pass recorded=False",
                    computation=min(run.backfilled),
                )
            run.finish_backfills()
            if wall is None:
                _run_on(run, plan, parts)
            else:
                repeat_supersteps(run, plan.supersteps, parts, fork.snapshot(), wall, told)
            summary = run.stop()
        return Replayed(
            version=plan.first.version,
            until=plan.last.version,
            supersteps=len(plan.supersteps),
            records=summary.run.records,
            newest=fork.snapshot().version,
        )


def _run_on(run: LocalRun, plan: ReplayPlan, parts: Mapping[str, RowSource]) -> None:
    """Give the rows to the code as `LocalRunner.run` does."""
    consume_inputs(run, parts, finish=plan.has_ended)
    for stream, part in parts.items():
        if plan.has_ended:
            run.finish(stream)
        else:
            observe_rows(run, stream, part)
    run.run_until_quiet()
