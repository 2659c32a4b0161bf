"""The beginning of a replay: its plan, its fork, and the sinks that are its own."""

from __future__ import annotations

from pathlib import Path

from millpond.executor.ownership.pipeline_names import as_stored
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.positions import superstep_of
from millpond.executor.pipeline.topology import Topology
from millpond.executor.repair.fork import fork_store
from millpond.executor.replay.note import NOTE, ReplayNote, note_text, read_note
from millpond.executor.replay.plan import ReplayPlan, plan_replay
from millpond.executor.sinks.fork import SinkFolder
from millpond.executor.sinks.record import SinkRecord
from millpond.executor.sinks.sink import DeltaSink, Sink
from millpond.statestore.errors import InvalidError
from millpond.statestore.identity.location import ROWS_FOLDER, local_folder, place_of
from millpond.statestore.log.log import Log
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng


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
    """Plan a replay and make its fork, unless an earlier call with the same arguments has made it.

    Args:
        store: the original.
        path: where the replay's store is to lie.
        pipeline: the code.
        version: the version of the original to begin with.
        until: the version to end with; by default that of the earlier call, or the newest.
        recorded: whether the supersteps of the original are to be repeated.
        clock: for timestamps.
        rng: the source of names.

    Raises:
        InvalidError: there is something else at the path, or see `plan_replay`.
        ConflictError: the version has been collected.
        DataError: bytes of the store are missing or wrong.
        UnavailableError: a store, or this machine's disk, failed.
    """
    known = _known_note(store, path)
    if until is None and known is not None:
        until = known.until
    with store.reading(version) as first:
        last = store.snapshot(until)
        topology = as_stored(pipeline.check(), last)
        plan = plan_replay(Log(store.objects), first, last, topology, recorded=recorded)
        note = _note_of(store, topology, plan, recorded=recorded)
        if known is not None and known != note:
            raise InvalidError(
                "there is another replay at this path: remove it, or name another",
                path=path,
                version=known.version,
                until=known.until,
            )
        if known is None or not _is_forked(store, path):
            fork_store(store, path, version, notes={NOTE: note_text(note)}, clock=clock, rng=rng)
    return plan


def _note_of(store: Store, topology: Topology, plan: ReplayPlan, *, recorded: bool) -> ReplayNote:
    sinks = topology.sinks
    return ReplayNote(
        store=store.path,
        pipeline=topology.name,
        version=plan.first.version,
        until=plan.last.version,
        recorded=recorded,
        superstep=superstep_of(plan.last.txns, topology.name),
        sinks={name: node.sink.identity for name, node in sinks.items() if isinstance(node.sink, DeltaSink)},
    )


def _known_note(store: Store, path: str | Path) -> ReplayNote | None:
    """The note of an earlier call, which may have been killed."""
    local = local_folder(path)
    if local is not None and not local.is_dir():
        return None
    return read_note(open_objects(str(path), store.storage_options))


def _is_forked(store: Store, path: str | Path) -> bool:
    """Whether there is a store where a note is: on an object store the note comes first."""
    rows = open_objects(f"{place_of(path)}/{ROWS_FOLDER}", store.storage_options)
    return Log(rows).latest_version() is not None


def with_own_sinks(pipeline: EnginePipeline, fork: Store, clock: Clock, rng: Rng) -> EnginePipeline:
    """The pipeline with sinks in the folder of a fork.

    Raises:
        DataError: the log of a parent's table is damaged, or does not reach back to where the fork began.
        UnavailableError: a table is unavailable.
    """
    folder = SinkFolder(store=fork.path, storage_options=fork.storage_options, clock=clock, rng=rng)
    name_in_store = as_stored(pipeline.check(), fork.snapshot()).name

    def place(name: str, sink: Sink) -> Sink:
        return folder.own(sink, SinkRecord(fork.lineage, name_in_store, name))

    return pipeline.with_sinks(place)
