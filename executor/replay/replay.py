"""Replay: the input of a past run again, from an older version of its store, through the same or other code.

A replay works on a fork (docs/design/013-replay-and-diff.md): the original is only read, and its sinks are left alone.
By default it repeats the recorded supersteps one by one, at their wall times. So the same code produces the same rows,
timers and sinks, and every difference is the effect of other code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from millpond.executor.inputs.extraction import Rows, RowsLike
from millpond.executor.inputs.positions import (
    LOCAL_SOURCE,
    digest_in,
    percentile_watermark_app_id,
    recorded_place,
    superstep_of,
)
from millpond.executor.inputs.row_digest import added, rows_digest
from millpond.executor.local.bounded import consume_inputs, observe_rows, rest_of_inputs
from millpond.executor.local.rows import RowSource, source_of
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.ownership.evolution import as_stored
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.replay.fork import fork_store
from millpond.executor.replay.recorded import (
    InputCursor,
    InputPart,
    RecordedSuperstep,
    consumed_rows,
    recorded_supersteps,
)
from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.fork import SinkFolder
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.app_ids import AppId, supersteps_of
from millpond.statestore.arguments import check_flags
from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError
from millpond.statestore.history.lineage import ROWS_FOLDER, local_folder, place_of
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import (
    TIME_MAX_US,
    Clock,
    EventTimeMicros,
    Objects,
    Rng,
    TableVersion,
    WallTimeMicros,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LOG = logging.getLogger("millpond")
_PIECE_ROWS: Final = 20_000

NOTE: Final = "replay.json"
"""The note's path in the store's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayNote:
    """The note in a replay's folder: which run it repeats, and where the original's sinks are."""

    store: str  # the original's location
    pipeline: str
    version: int
    until: int
    recorded: bool
    superstep: int  # the original's last one
    sinks: Mapping[str, str] = field(default_factory=dict)  # the original's tables, by name of a `DeltaSink`


def read_note(folder: Objects) -> ReplayNote | None:
    try:
        return ReplayNote(**orjson.loads(folder.get(NOTE)))
    except ObjectMissingError:
        return None
    except (TypeError, ValueError) as error:
        raise DataError("the note of the replay cannot be read", path=NOTE, store=folder.url) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """A section of the original's history to replay."""

    first: Snapshot
    last: Snapshot
    supersteps: tuple[RecordedSuperstep, ...]  # oldest first; empty unless they are repeated
    recorded: bool
    has_ended: bool  # all inputs had ended by the last version

    def replayed(self, fork: Store, records: int) -> Replayed:
        return Replayed(
            version=self.first.version,
            until=self.last.version,
            supersteps=len(self.supersteps),
            records=records,
            newest=fork.snapshot().version,
        )

    def parts(
        self, topology: Topology, given: Mapping[str, RowSource], *, since_version: bool
    ) -> dict[str, RowSource]:
        """Return the parts of the given inputs that the original consumed up to the last version.

        With ``since_version`` the given inputs begin with the first row after the first version.
        """
        parts: dict[str, RowSource] = {}
        for stream in topology.injectors:
            begins = consumed_rows(self.first, topology.name, stream)
            ends = consumed_rows(self.last, topology.name, stream)
            if stream not in given:
                if ends <= begins:
                    continue
                raise InvalidError(
                    "the original consumed an input that is not given: give its rows under the stream's name",
                    input=stream,
                    rows=ends - begins,
                )
            source = given[stream]
            missing = begins if since_version else 0
            # `LocalRunner.run` counts only rows of bounded inputs.
            injected = AppId.INJECTED.of(topology.name, stream)
            by_calls = 0 if self.recorded else self.first.txns.get(injected, 0)
            if source.count < ends - missing:
                raise InvalidError(
                    "the input has fewer rows than the original had consumed by then: give all of its rows",
                    input=stream,
                    rows=source.count,
                    consumed=ends - missing,
                    until=self.last.version,
                )
            parts[stream] = part = InputPart(source, missing - by_calls, ends - by_calls)
            self._compare(topology.name, stream, part)
        return parts

    def _compare(self, pipeline: str, stream: str, part: InputPart) -> None:
        """Warn if the rows differ from the consumed ones, as far as the original recorded their digest."""
        app_id = AppId.INPUT.of(pipeline, stream, LOCAL_SOURCE)
        begin, end = (
            recorded_place(known.source_offsets.get(app_id), known.txns.get(app_id))
            for known in (self.first, self.last)
        )
        before, after = digest_in(begin) if part.begins else 0, digest_in(end)
        is_recorded = end.get("rows") == part.ends and part.begins in (0, begin.get("rows"))
        if before is None or after is None or not is_recorded:
            return
        at = part.begins
        for count, rows in part.pieces(at, _PIECE_ROWS):
            before = added(before, rows_digest(rows, at))
            at += count
        if before != after:
            _LOG.warning(
                "the input is not what the original consumed, so what it leads to says nothing about the code: give the same "
                "rows in the same order: input=`%s`%s",
                stream,
                "".join(
                    f" {name}=`{place['file']}`"
                    for name, place in (("consumed", end), ("given", part.place(part.ends)))
                    if "file" in place
                ),
            )


def plan_replay(
    log: Log, first: Snapshot, last: Snapshot, topology: Topology, *, recorded: bool
) -> ReplayPlan:
    if last.version < first.version:
        raise InvalidError(
            "the last version of a replay comes before its first", version=first.version, until=last.version
        )
    pipeline = topology.name
    known = supersteps_of(last.txns)
    if pipeline not in known:
        raise InvalidError(
            "the store has no pipeline of that name: give the replay the name of the original",
            pipeline=pipeline,
            known=", ".join(sorted(known)) or "none",
        )
    ends = [
        last.txns.get(percentile_watermark_app_id(pipeline, "injector", stream)) == TIME_MAX_US
        for stream, node in topology.injectors.items()
        if not node.signals
    ]
    supersteps = tuple(recorded_supersteps(log, first, last.version, pipeline)) if recorded else ()
    if supersteps and supersteps[-1].superstep != superstep_of(last.txns, pipeline):
        raise InvalidError(
            "the log does not name the last superstep", superstep=superstep_of(last.txns, pipeline)
        )
    return ReplayPlan(
        first=first, last=last, supersteps=supersteps, recorded=recorded, has_ended=bool(ends) and all(ends)
    )


def begin_replay(
    store: Store,
    path: str | Path,
    pipeline: EnginePipeline,
    version: int,
    until: int | None,
    *,
    recorded: bool,
    clock: Clock,
    rng: Rng,
) -> ReplayPlan:
    """Plan a replay and create its fork, unless an earlier call with the same arguments has created it.

    Without ``until`` the replay ends where the earlier call did, or with the newest version.
    """
    local = local_folder(path)
    # The note of an earlier call, which may have been killed.
    is_new = local is not None and not local.is_dir()
    known = None if is_new else read_note(open_objects(str(path), store.storage_options))
    if until is None and known is not None:
        until = known.until
    with store.reading(version) as first:
        # Its files are not read, and may have been collected.
        last = load(store.log, None if until is None else TableVersion(until))
        topology = as_stored(pipeline.check(), last)
        plan = plan_replay(Log(store.objects), first, last, topology, recorded=recorded)
        sinks = {name: node.sink for name, node in topology.sinks.items()}
        note = ReplayNote(
            store=store.path,
            pipeline=topology.name,
            version=plan.first.version,
            until=plan.last.version,
            recorded=recorded,
            superstep=superstep_of(plan.last.txns, topology.name),
            sinks={name: sink.identity for name, sink in sinks.items() if isinstance(sink, DeltaSink)},
        )
        if known is not None and known != note:
            raise InvalidError(
                "there is another replay at this path: remove it, or name another",
                path=path,
                version=known.version,
                until=known.until,
            )
        is_forked = False
        if known is not None:
            # On an object store the note is written first, so there may be one without a store.
            rows = open_objects(place_of(path), store.storage_options, folder=ROWS_FOLDER)
            is_forked = Log(rows).latest_version() is not None
        if not is_forked:
            # The note appears with the store, so that a killed call is recognised and resumed.
            text = orjson.dumps(asdict(note), option=orjson.OPT_INDENT_2)
            fork_store(store, path, version, notes={NOTE: text}, clock=clock, rng=rng)
    return plan


def with_own_sinks(pipeline: EnginePipeline, fork: Store, clock: Clock, rng: Rng) -> EnginePipeline:
    folder = SinkFolder(store=fork.path, storage_options=fork.storage_options, clock=clock, rng=rng)
    name_in_store = as_stored(pipeline.check(), fork.snapshot()).name

    def place(name: str, sink: Sink) -> Sink:
        return folder.own(sink, SinkRecord(fork.lineage, name_in_store, name))

    return pipeline.with_sinks(place)


@dataclass(slots=True)
class ReplayClock:
    """A `Clock` with a set wall time; the machine's clock measures durations and waits."""

    machine: Clock
    wall_us: WallTimeMicros

    def now_us(self) -> WallTimeMicros:
        return self.wall_us

    def monotonic_us(self) -> int:
        return self.machine.monotonic_us()

    def sleep_ms(self, duration_ms: float) -> None:
        self.machine.sleep_ms(duration_ms)


def repeat_supersteps(
    run: LocalRun,
    supersteps: Sequence[RecordedSuperstep],
    parts: Mapping[str, RowSource],
    reached: Snapshot,
    wall: ReplayClock,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Repeat, on a stepping run, the recorded supersteps that the fork ``reached`` does not have yet.

    ``parts`` has rows by injected stream; other streams are left out. ``wall`` is the run's clock.
    """
    pipeline = run.topology.name
    done = superstep_of(reached.txns, pipeline)
    cursors = {
        stream: InputCursor(part, consumed_rows(reached, pipeline, stream)) for stream, part in parts.items()
    }
    consumed = {stream: run.consumed(stream).get(LOCAL_SOURCE, 0) for stream in cursors}
    for number, superstep in enumerate(supersteps, start=1):
        if superstep.superstep > done:
            wall.wall_us = superstep.conditions.wall_time
            _repeat_one(run, superstep, cursors, consumed)
        on_progress(number, len(supersteps))


def _repeat_one(
    run: LocalRun, superstep: RecordedSuperstep, cursors: Mapping[str, InputCursor], consumed: dict[str, int]
) -> None:
    rows: list[tuple[str, Rows]] = []
    for name, count in superstep.taken:
        if name in cursors:
            rows += [(name, part) for part in cursors[name].take(count)]
    stream, position = superstep.stream, None
    after: dict[str, EventTimeMicros] = {}
    if stream is not None and stream in cursors:
        count = superstep.consumed - consumed[stream]
        rows += [(stream, part) for part in cursors[stream].take(count)]
        consumed[stream] = superstep.consumed
        position = InputPosition(
            stream=stream, source=LOCAL_SOURCE, batch=superstep.consumed, rows=superstep.observed
        )
        promised = superstep.journaled.get(percentile_watermark_app_id(run.topology.name, "injector", stream))
        if promised is not None and superstep.observed is None and run.topology.sorts:
            after = {stream: EventTimeMicros(promised)}
    run.repeat(rows, superstep.conditions, superstep.journaled, position=position, after=after)


_CHECKED_ROWS: Final = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a replay.

    Attributes:
        version: the version of the original that the replay began with.
        until: the version of the original that the replay ended with.
        supersteps: number of recorded supersteps in between; 0 if they were not repeated one by one.
        records: number of records that the computations processed in this call.
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

    The original is only read, and may run meanwhile. Each sink of the replay is a table ``sinks/NAME`` in the replay's
    folder, which begins with the rows that the original had delivered by that version. A replay that was killed resumes
    when it is called again with the same arguments. `compare_stores` shows the differences.

    Args:
        store: the original; read-only is enough.
        path: location of the replay's store: a missing or empty folder, or a URL.
        pipeline: the same code or other code, under the same pipeline name.
        inputs: by injected stream, the rows that the original was given, in the same order, in any form that
            `LocalRunner.run` takes.
        version: the version of the original to begin with.
        until: the version up to which the original's input is replayed; its newest by default.
        recorded: repeat the original's supersteps: with the same rows, at the same wall time, under the same
            watermarks of its inputs, whatever watermarks the new code declares. Otherwise one `LocalRunner.run`
            gets all rows, and ends the input where the original had ended it.
        since_version: the inputs begin with the first row after the version, not with the very first row.
        zookeeper: ``host:port,…`` of an ensemble for the replay's store; ``None`` runs a server next to it.
        cache_mib: soft-state budget, in MiB.
        progress: show a progress line and log supersteps.
        clock: the machine's clock.
        rng: the source of names.
        told: called after each superstep, with the number of supersteps done and the total.

    Raises:
        InvalidError: there is no such version, the pipeline has another name, the inputs have fewer rows than the
            original consumed, its log does not record how it consumed them, or the path is not empty.
        ConflictError: the version has been collected.
        DataError: bytes of the store are missing or wrong.
        UnavailableError: a store or ZooKeeper cannot be reached.

    Example::

        with mp.Store.open("pond", read_only=True) as store:
            mp.replay(store, "what_if", pipeline, {"payments": rows}, version=120)
    """
    check_flags(recorded=recorded, since_version=since_version)
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
            if wall is not None:
                repeat_supersteps(run, plan.supersteps, parts, fork.snapshot(), wall, told)
            else:
                consume_inputs(run, rest_of_inputs(run, parts), finish=plan.has_ended)
                if plan.has_ended:
                    run.finish_inputs(parts)
                else:
                    for stream, part in parts.items():
                        observe_rows(run, stream, part)
                    run.come_to_rest()
            summary = run.stop()
        return plan.replayed(fork, summary.run.records)


def replay_on_spark(
    store: Store,
    path: str | Path,
    pipeline: EnginePipeline,
    inputs: Mapping[str, DataFrame],
    *,
    version: int,
    spark: SparkSession | None = None,
    zookeeper: str | None = None,
    cache_mib: int = 512,
    progress: bool = False,
    clock: Clock | None = None,
    rng: Rng | None = None,
) -> Replayed:
    """Run a pipeline on Spark over the sources of a past run, on a fork that begins with an older version.

    Like `replay`, which explains the arguments and errors, but with the present contents of the sources, each a
    DataFrame, in batches that Spark cuts. Checkpoints of streaming queries in the original's folder are copied, and
    resume after the batches that the version had consumed. A source of files that are not on this machine delivers
    the files that the original read after the version in one batch. A bounded input that has grown since is refused.
    The original is only read; the sinks of the replay are tables in the replay's folder. Without ``spark`` a session
    is created if needed.

    Example::

        with mp.Store.open("pond", read_only=True) as store:
            mp.spark.replay_on_spark(store, "what_if", pipeline, {"payments": stream}, version=120)
    """
    from millpond.executor.spark.runner import SparkRunner
    from millpond.executor.spark.session import refuse_connect

    refuse_connect(spark)
    for stream, frame in inputs.items():
        refuse_connect(frame, input=stream)
    clock, rng = clock or SystemClock(), rng or SystemRng()
    plan = begin_replay(store, path, pipeline, version, None, recorded=False, clock=clock, rng=rng)
    with Store.open(
        path, zookeeper, storage_options=store.storage_options, clock=clock, rng=rng, create=False
    ) as fork:
        runner = SparkRunner(
            fork,
            spark=spark,
            cache_mib=cache_mib,
            progress=progress,
            dead_letter_limit=None,
            clock=clock,
            rng=rng,
        )
        own = with_own_sinks(pipeline, fork, clock, rng)
        summary = runner.run(own, inputs, finish=plan.has_ended)
        return plan.replayed(fork, summary.run.records)
