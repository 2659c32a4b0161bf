"""``millpond adopt``, ``repair`` and ``rewind``: stores that were moved or damaged, or go back to an older version.

Repair and rewind hold the leases of the whole store during the commit, and until Spark's checkpoints in the store's
folder and the catalog have gone back, too. Otherwise a pipeline could start in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from millpond.cli.completion import complete_savepoint
from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.opening import StoreAt, read_options, store_argument, version_in, zookeeper_options
from millpond.cli.terminal.options import flag, json_option, option, several, yes_option
from millpond.cli.terminal.output import note, print_table, progress_bar, result_as_json, say
from millpond.executor.inputs.positions import BOUNDED_SOURCE, LOCAL_SOURCE
from millpond.executor.replay.repair import SET_ASIDE_FOLDER, hold_store, repair_store
from millpond.executor.replay.repair_plan import (
    RepairPlan,
    plan_repair,
    plan_rewind,
    sinks_of_rewind,
    undone_by,
)
from millpond.executor.replay.spark_checkpoint import Reached, by_query, reached_batches, rewind_checkpoints
from millpond.executor.run.options import CHECKPOINTS_FOLDER
from millpond.executor.sinks.delta_table import TakenBack, begin_anew, take_back_sink, take_over_sink
from millpond.executor.sinks.fork import SINKS_FOLDER
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.app_ids import AppId, supersteps_of
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.errors import ConflictError, DataError, InvalidError, MillpondError, did_you_mean
from millpond.statestore.history.lineage import ROWS_FOLDER, Lineage, Origin, place_of
from millpond.statestore.history.replayed_log import read_histories
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.leases.lease import Leases
from millpond.statestore.leases.zookeeper_client import security_of
from millpond.statestore.leases.zookeeper_service import ZooKeeperService, connect_leases
from millpond.statestore.log.high_water import Mark, later_mark, list_marks, newest_mark
from millpond.statestore.log.log import LOG_FOLDER, Log
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import STORE_ID_KEY, store_id_of
from millpond.statestore.objects.hadoop import scheme_of
from millpond.statestore.objects.obstore import local_path, open_objects
from millpond.statestore.store import rebuild_catalog
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects, Superstep, TableVersion

_KINDS: Final = ("moved", "copy", "restored")
_NOT_AGAIN: Final = "a sink that was taken back then does not receive the version's output again"
_WHOLE: Final = "the store is whole: there is nothing to repair"


@command(
    "millpond adopt pond --as moved",
    "millpond adopt pond_of_today --as copy",
    "millpond adopt pond --as restored --take-back out/spikes",
    Example(
        "millpond adopt s3://bucket/pond --as restored --zookeeper zk1:2181,zk2:2181",
        not_run="a bucket and an ensemble",
    ),
)
@store_argument
@option("--as kind", "What the store is now.", choices=_KINDS, required=True)
@several(
    "--take-back=TABLE sinks", "A sink's Delta table to take back to where the store is; may be repeated."
)
@zookeeper_options
@json_option("One JSON object: which incarnation the store is now, and the sinks that were taken back.")
def adopt(store: StoreAt, kind: str, sinks: tuple[str, ...], *, as_json: bool) -> None:
    """Declare that STORE was moved, copied or restored from a backup.

    A store at another place than before, or older than its sinks, is refused until you declare why:

    moved: the folder was moved or renamed, and there is no other. Everything continues.

    copy: the original stays in use. This store continues separately, with separate leases. The sinks of the original
    refuse it: give its pipeline other ones.

    restored: this is an older copy, a backup for example, in place of a store that was lost. Input is consumed
    again from the copy's positions, if its sources still have it. Sinks that are ahead of the copy are refused: write to
    new ones, or take them back with --take-back, which removes what later supersteps delivered.

    Stop the pipelines of the store before.
    """
    if sinks and kind != "restored":
        raise InvalidError("only for a restored store a sink is taken back", adopt=kind)
    options = read_options(store.storage_options)
    _check_tables(sinks, options)
    with (
        result_as_json(as_json) as result,
        store.to_write(adopt=kind, clock=SystemClock(), rng=SystemRng()) as opened,
    ):
        lineage = opened.lineage
        supersteps = supersteps_of(opened.committer.snapshot.txns)
        say(f"adopted as {kind}: incarnation {lineage.current.id} of store {lineage.store_id}")
        result |= {
            "store": store.path,
            "store_id": lineage.store_id,
            "incarnation": lineage.current.id,
            "origin": lineage.current.origin,
            "sinks": [],
        }
        for sink in sinks:
            result["sinks"] += _take_back(sink, options, lineage, supersteps, "is not ahead of the store")


@command(
    "millpond repair pond --dry-run",
    "millpond repair pond",
    Example(
        "millpond repair s3://bucket/pond --zookeeper zk1:2181,zk2:2181 --yes",
        not_run="a bucket and an ensemble",
    ),
    exit_codes={
        0: "the store is whole",
        1: "it is not; with --dry-run: there is something to repair; or an error",
    },
)
@store_argument
@flag("--dry-run", "Report what would be done, and change nothing.")
@yes_option
@zookeeper_options
@json_option("One JSON object: what was done, or would be.")
@click.pass_context
def repair(context: click.Context, store: StoreAt, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Repair a damaged STORE.

    Run `millpond verify` first: it reports the damage. Repair then proceeds in this order: it restores a
    flipped bit where a seal proves the result; it replaces a compaction's output by the files that it was
    made from, if they still exist; otherwise it rolls the whole store back to its newest whole version,
    state and input positions together, so that input consumed since is read again from its source. Files
    that cannot stay in the log are copied aside first. A feature that another engine has switched on in the
    store's table is switched off again, without loss. The command reports its plan and any loss, and asks
    for confirmation.

    Stop the pipelines of the store before. Afterwards `millpond verify` finds no damage; start the pipelines
    again to continue. Output that undone supersteps delivered to sinks stays there, and is delivered again.
    If a repair is killed, run it again to finish it.
    """
    with result_as_json(as_json) as result, _held(store) as held:
        # Read before the table, because a query that still runs would otherwise seem to be ahead of it.
        reached = held.reached()
        with progress_bar("reading the store"):
            plan = plan_repair(held.objects, held.mark())
        ahead = _queries_ahead(plan, reached)
        is_needed = plan.is_needed or bool(ahead)
        undone = _undone(plan)
        result |= {"store": store.path, "dry_run": dry_run, "is_needed": is_needed, **undone}
        result |= {
            "healed": sorted(plan.healed),
            "restored": [asdict(file) for file in plan.restored],
            "lost": list(plan.lost),
            "set_aside": list(plan.set_aside),
            "queries": dict(ahead),
            "committed": None,
        }
        _describe_repair(plan, undone, held, ahead)
        if is_needed and not yes and not dry_run:
            click.confirm("Repair it?", abort=True)
        if dry_run:
            if not is_needed:
                say(_WHOLE)
        elif plan.is_needed:
            result["committed"] = version = _restore(plan, held, ahead, "repairing")
            say(f"repaired: version {version} holds what version {plan.state.version} held")
        else:
            # A repair that was killed after its commit may have left the dependents behind.
            newest_kind = plan.history.changes[-1].kind if plan.history.changes else ""
            if ahead or newest_kind == "repair":
                with hold_store(plan, held.leases):
                    # The plan was made without the leases: a commit since would make it outdated.
                    newest = load(Log(held.objects)).version
                    if newest != plan.newest:
                        raise ConflictError(
                            "another process has committed meanwhile; repair again", newest=newest
                        )
                    _take_dependents_back(plan, held, ahead)
            say("the earlier repair is finished" if ahead else _WHOLE)
    context.exit(1 if dry_run and is_needed else 0)


def _restore(plan: RepairPlan, held: _Held, ahead: Mapping[str, int], what: str) -> TableVersion:
    finish = partial(_take_dependents_back, plan, held, ahead)
    with progress_bar(what):
        done = repair_store(held.objects, plan, held.leases, SystemClock(), SystemRng(), then=finish)
    return done.version


def _describe_repair(
    plan: RepairPlan, undone: Mapping[str, Any], held: _Held, ahead: Mapping[str, int]
) -> None:
    if not plan.is_needed:
        for query, at in sorted(ahead.items()):
            say(f"the checkpoint of query {query} is ahead of the store and goes back to batch {at}")
        return
    rows = [(path, "one bit is turned back", "nothing") for path in sorted(plan.healed)]
    if plan.form is not None:
        rows.append(("the table's features", f"{', '.join(undone['features'])} switched off", "nothing"))
    rows += [
        (file.path, f"restored from the {len(file.sources)} files that it was compacted from", "nothing")
        for file in plan.restored
    ]
    versions = f"versions {plan.state.version + 1} to {plan.newest} are undone"
    rows += [(path, versions, "what it held since then") for path in plan.lost]
    rows += [(path, "set aside", "history") for path in plan.set_aside]
    print_table("", ("file", "what is done", "what is lost"), rows)
    if plan.is_rollback:
        say(f"the store goes back from version {plan.newest} to version {plan.state.version}")
    _describe_undone(undone, held)
    for one in undone["supersteps"]:
        note(f"sinks of {one['pipeline']} keep the output of these supersteps, and receive it again")
    if not plan.is_readable:
        note(f"older versions become unreadable; the old log is copied to rows/{SET_ASIDE_FOLDER}")


@command(
    "millpond rewind pond --version 12 --dry-run",
    "millpond rewind pond --version 12 --take-back out/spikes --yes",
    'millpond rewind pond --version "before the sale"',
)
@store_argument
@option(
    "--version=N|NAME named",
    "The version to go back to, or its savepoint.",
    required=True,
    shell_complete=complete_savepoint,
)
@several("--take-back=TABLE sinks", "A sink's Delta table that goes back too; may be repeated.")
@flag(
    "--accept-loss", "Go to a version that an earlier rewind undid, without output that was taken back then."
)
@flag("--dry-run", "Report what would be undone, and change nothing.")
@yes_option
@zookeeper_options
@json_option("One JSON object: what was undone, or would be.")
def rewind(
    store: StoreAt,
    named: str,
    sinks: tuple[str, ...],
    *,
    accept_loss: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Take STORE back to an older version: rows, timers, record ids and input positions of all computations together.

    It is a commit like any other: the undone versions stay readable. Checkpoints of Spark's queries that lie in the
    store's folder go back with it. The pipelines then read their input again from where they were at that version, with
    the same code or other code.

    Output that the undone supersteps delivered to sinks stays there, and is delivered again, unless you name the sink's
    table with --take-back: then this output is removed from it, if no other writer has changed the same files since.

    You can go to a version that an earlier rewind undid, but sinks do not: output that was taken back from a table then
    is not delivered again. So such a rewind needs --accept-loss.

    Stop the pipelines of the store before. If a rewind is killed, run it again to finish it.
    """
    _check_tables(sinks, read_options(store.storage_options))
    with result_as_json(as_json) as result, _held(store) as held:
        # Before the table, as for a repair.
        reached = held.reached()
        snapshot = load(Log(held.objects))
        version = TableVersion(version_in(open_savepoints(snapshot.txns), named))
        with progress_bar("reading the log"):
            plan = plan_rewind(held.objects, version, held.mark())
            undid = undone_by(held.objects, plan)
        undone = _undone(plan)
        result |= {"store": store.path, "dry_run": dry_run, **undone, "committed": None, "sinks": []}
        say(f"the store goes back from version {plan.newest} to version {version}")
        _describe_undone(undone, held)
        if undid is not None:
            note(f"version {version} was undone by version {undid}: {_NOT_AGAIN}")
        if dry_run:
            return
        if undid is not None and not accept_loss:
            raise InvalidError(
                f"an earlier rewind or repair undid this version, and {_NOT_AGAIN}; run the pipeline from where the store is, "
                "which delivers the output of its input again, or pass --accept-loss",
                version=version,
                undone_by=undid,
            )
        if not yes:
            click.confirm("Rewind it?", abort=True)
        committed = result["committed"] = _restore(plan, held, _queries_ahead(plan, reached), "rewinding")
        say(f"rewound: version {committed} holds what version {version} held")
        lineage, supersteps = Lineage.of(store_id_of(snapshot), snapshot.txns), sinks_of_rewind(plan)
        nothing = "has nothing of the undone supersteps"
        for sink in sinks:
            result["sinks"] += _take_back(sink, held.options, lineage, supersteps, nothing)
        for one in () if sinks or undid is not None else undone["supersteps"]:
            note(f"sinks of {one['pipeline']} keep the output of the undone supersteps, and receive it again")


@command(
    "millpond take-over pond out/spikes",
    Example("millpond take-over what_if out/spikes --keep-rows", not_run="a fork"),
)
@store_argument
@click.argument("sinks", metavar="TABLE...", nargs=-1, required=True)
@flag("--keep-rows", "Keep the rows that other copies of STORE have delivered.")
@zookeeper_options
@json_option("One JSON object: the sinks that were taken over.")
def take_over(store: StoreAt, sinks: tuple[str, ...], *, keep_rows: bool, as_json: bool) -> None:
    """Make STORE the only copy that writes to the sinks at TABLE, its folder or URL.

    For a store that is refused because another copy of it, a fork for example, has written to its sink: what the copies
    have delivered to TABLE since they parted from STORE is removed, in one commit, unless you give --keep-rows. STORE then
    continues where it was, and the others are refused.

    For a fork, whose sinks are otherwise tables in its own folder: it writes to TABLE itself from its next start on, in
    place of its original. What the original has delivered since the fork is removed. The table may be missing, and
    TABLE may be the identity of a sink that is no Delta table. What the fork has delivered to its own tables so far
    stays there.

    For a store that is refused because TABLE was removed or replaced: its sink begins anew there, and gets what comes next.

    Stop the pipelines of STORE before.
    """
    options = read_options(store.storage_options)
    with result_as_json(as_json) as result, store.to_write() as opened:
        lineage = opened.lineage
        result |= {"store": store.path, "incarnation": lineage.current.id, "sinks": []}
        is_fork = lineage.copied.origin is Origin.FORK
        for sink in sinks:
            place = DeltaSink(sink).identity
            snapshot, positions = opened.committer.snapshot, dict[str, int]()
            if is_fork:
                taken_ids = (AppId.SINK_TAKEN.of(lineage.copied.id, name) for name in {sink, place})
                positions = dict.fromkeys(taken_ids, snapshot.version + 1)
            # A fork's sink of another kind is no table, and has no record that could refuse either copy.
            with suppress(InvalidError) if is_fork else nullcontext():
                positions |= begin_anew(open_objects(place, options), lineage, {sink, place}, snapshot.txns)
            if positions:
                # First, so that a crash leaves no table that refuses the original and that the fork does not write.
                opened.committer.commit(CommitRequest(kind="adoption", positions=positions))
            taken: tuple[TakenBack, ...] = ()
            with suppress(InvalidError) if is_fork else nullcontext():
                table = open_objects(place, options)
                taken = take_over_sink(table, lineage, SystemClock(), SystemRng(), keeps_rows=keep_rows)
            result["sinks"] += [{"table": sink, **asdict(part)} for part in taken]
            removed = sum(part.files for part in taken)
            say(
                f"{sink} is written by {store.path} from now on"
                + (f"; {removed} files removed" if removed else "")
            )
        begun = {pipeline: at for (copy, pipeline), at in lineage.forks.items() if copy == lineage.copied.id}
        if is_fork and any(
            at > begun.get(name, 0) for name, at in supersteps_of(opened.committer.snapshot.txns).items()
        ):
            note(
                f"the fork has run before: what it delivered then stays in {store.path}/{SINKS_FOLDER}, and is "
                "missing from here on; take sinks over before a fork's first run, or copy the rows"
            )


def _check_tables(sinks: Iterable[str], options: Mapping[str, str]) -> None:
    """Refuse a misspelt table before the store has changed: the user would have to find out what is left to do."""
    for sink in sinks:
        folder = local_path(sink)
        # Opening a missing folder would create it.
        may_exist = folder is None or folder.is_dir()
        if may_exist and Log(open_objects(sink, options)).latest_version() is not None:
            continue
        known = [] if folder is None else [log.parent.name for log in folder.parent.glob(f"*/{LOG_FOLDER}")]
        hint = did_you_mean(Path(sink).name, known)
        raise InvalidError(
            f"there is no Delta table at this path{hint}: name the folder or URL of a sink's table", path=sink
        )


def _take_back(
    sink: str, options: Mapping[str, str], lineage: Lineage, supersteps: Mapping[str, Superstep], nothing: str
) -> list[dict[str, Any]]:
    """Take a sink's table back, and return the parts of it that were ahead, for JSON."""
    table = open_objects(sink, options)
    taken = take_back_sink(table, lineage, supersteps, SystemClock(), SystemRng())
    for part in taken:
        say(
            f"sink {part.name} of {part.pipeline}: back from superstep {part.delivered} to "
            f"{part.superstep}, {part.files} files removed"
        )
    if not taken:
        say(f"{sink} {nothing}")
    return [{"table": sink, **asdict(part)} for part in taken]


@dataclass(frozen=True, slots=True)
class _Held:
    """A store's table and lease service, without `Store.open`, which would refuse a damaged store."""

    root: str
    options: Mapping[str, str]
    objects: Objects
    leases: Leases

    @property
    def checkpoints(self) -> str:
        """The folder of Spark's checkpoints, unless the runner named another one."""
        return f"{self.root}/{CHECKPOINTS_FOLDER}"

    def reached(self) -> Mapping[str, Reached]:
        return reached_batches(self.checkpoints, self.options)

    def mark(self) -> Mark | None:
        """Return the newest of the high-water marks in ZooKeeper and in the store's folder."""
        known = [incarnation.id for incarnation in Lineage.of(*_store_id(self.objects)).incarnations]
        marks = list_marks(open_objects(self.root, self.options))
        mark = later_mark(self.leases.high_water.read(), newest_mark(marks, known))
        if mark is not None and mark.successor:
            raise DataError(
                "another incarnation took the place of this store: repair that one, or go on with this as a copy "
                "(`millpond adopt STORE --as copy`)",
                store=self.root,
                successor=mark.successor,
            )
        return mark


@contextmanager
def _held(store: StoreAt) -> Iterator[_Held]:
    options, root = read_options(store.storage_options), place_of(store.path)
    if "://" not in root and not Path(root, ROWS_FOLDER).is_dir():
        raise InvalidError(
            "there is no store at this path: a store is the folder that a runner was given", path=store.path
        )
    objects = open_objects(root, options, folder=ROWS_FOLDER)
    security = security_of(store.zookeeper, store.zookeeper_security)
    clock, rng = SystemClock(), SystemRng()
    store_id, txns = _store_id(objects)
    with ExitStack() as resources:
        service = ZooKeeperService.at(root, store.zookeeper, security, clock, rng, resources)
        leases = connect_leases(service, txns, Lineage.of(store_id, txns).current.id, rng.token())
        resources.callback(leases.close)
        yield _Held(root, options, objects, leases)


def _store_id(objects: Objects) -> tuple[str, Mapping[str, int]]:
    """Return the id and the transactions of a store."""
    # Any readable stretch of a damaged log has the table's metadata and positions.
    for history in read_histories(Log(objects), None):
        if history.metadata is not None and (known := history.metadata.configuration.get(STORE_ID_KEY)):
            return known, history.state.txns
    raise DataError("nothing of the log can be read: restore the store from a copy", store=objects.url)


def _undone(plan: RepairPlan) -> dict[str, Any]:
    """Return the versions, supersteps and input positions that a plan undoes, for JSON."""
    supersteps = [
        {"pipeline": AppId.SUPERSTEP.parts(app_id)[0], "superstep": kept, "was": was}
        for app_id, (kept, was) in plan.moved(AppId.SUPERSTEP).items()
    ]
    inputs = []
    for app_id, (kept, was) in plan.moved(AppId.INPUT).items():
        pipeline, stream, source = AppId.INPUT.parts(app_id)
        inputs.append({"pipeline": pipeline, "input": stream, "source": source, "batch": kept, "was": was})
    return {
        "newest": plan.newest,
        "version": plan.state.version,
        "supersteps": supersteps,
        "inputs": inputs,
        "features": sorted({duty.feature for duty in plan.history.duties}),
    }


def _describe_undone(undone: Mapping[str, Any], held: _Held) -> None:
    for one in undone["supersteps"]:
        say(f"pipeline {one['pipeline']}: supersteps {one['superstep'] + 1} to {one['was']} are undone")
    for one in undone["inputs"]:
        stream, source, kept = one["input"], one["source"], one["batch"]
        say(
            f"input {stream} of {one['pipeline']}: read again from position {kept + 1} (it was at {one['was']})"
        )
        # Spark reads the input again by itself where its checkpoint goes back with the store.
        rewound = rewind_checkpoints(
            held.checkpoints, {source: kept}, storage_options=held.options, dry_run=True
        )
        if source in (LOCAL_SOURCE, BOUNDED_SOURCE):
            note(f"`millpond run`, or `run` of a runner, reads {stream} from there if it gets the same input")
        elif source not in rewound:
            note(f"inject {stream} again from that position (source {source})")


def _queries_ahead(plan: RepairPlan, reached: Mapping[str, Reached]) -> dict[str, int]:
    """Return the queries whose checkpoints are ahead of the store after a plan, and the batch each goes back to."""
    return {
        query: at
        for query, at in plan.consumed().items()
        if query in reached and reached[query].is_ahead_of(at)
    }


def _take_dependents_back(plan: RepairPlan, held: _Held, ahead: Mapping[str, int]) -> None:
    """Take Spark's checkpoints back to the store's state, and rebuild the catalog; repeating it changes nothing."""
    sources = {query: kept for query, (kept, _) in by_query(plan.moved(AppId.INPUT)).items()}
    batches = {**sources, **ahead}
    offsets = by_query(plan.source_offsets)
    for query in rewind_checkpoints(held.checkpoints, batches, offsets=offsets, storage_options=held.options):
        note(f"the checkpoint of query {query} was taken back to batch {batches[query]}")
    if scheme_of(held.root):
        return  # In an object store a store has no catalog of its own.
    try:
        with Catalog.open(default_catalog_url(held.root), SystemClock()) as catalog:
            rebuild_catalog(catalog, Log(held.objects))
    except MillpondError as error:
        # The catalog can be rebuilt later: everything but the code versions comes from the log.
        note(f"the catalog was not rebuilt: {error.message}")
