"""
``millpond repair``: a damaged store made whole again, as far as its bytes allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import click

from millpond.executor.repair.plan import RepairPlan, plan_repair
from millpond.executor.repair.repair import SET_ASIDE_FOLDER, hold_store, repair_store
from millpond.executor.repair.spark_checkpoint import reached_batches, rewind_checkpoints
from millpond.statestore.catalog.catalog import Catalog, default_catalog_url
from millpond.statestore.catalog.rebuild import logged_commits
from millpond.statestore.errors import ConflictError, DataError, InvalidError, MillpondError
from millpond.statestore.integrity.table_history import read_histories
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import STORE_ID_KEY
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import place_of
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects
from millpond.statestore.zookeeper.lease import ZooKeeperLeases
from millpond.statestore.zookeeper.server import EmbeddedZooKeeper
from millpond.tools.cli_help import TeachingCommand
from millpond.tools.opening import read_options, store_argument
from millpond.tools.output import note, print_table

__all__ = ["repair"]

_WHOLE: Final = "the store is whole: there is nothing to repair"


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond repair pond --dry-run",
        "millpond repair pond",
        "millpond repair s3://bucket/pond --zookeeper zk1:2181,zk2:2181 --yes",
    ),
)
@store_argument
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--zookeeper", metavar="HOSTS", help="The store's ensemble, unless it runs beside the store.")
def repair(
    store: str, storage_options: tuple[str, ...], zookeeper: str | None, *, dry_run: bool, yes: bool
) -> None:
    """
    Make a damaged STORE whole again.

    Run `millpond verify` first: it says what is damaged. Repair then does, in this order: turns a flipped bit
    back where a seal tells that it was one; replaces a file that a compaction made by those it was compacted from, if
    they are still there; and else takes the whole store back to its newest version that is whole, state and
    input positions together, so that what was consumed since is read again from its source. What cannot
    stay in the log is copied aside first. It says what it does, and what is lost, and asks.

    Stop the pipelines of the store before. Afterwards `millpond verify` finds nothing, and they go on by being
    started again. What sinks were given by the supersteps that are undone stays there, and comes again. A
    repair that was killed is finished by running it again.

    The exit code is 0 if the store is whole, 1 if it is not (with --dry-run: if there is something to repair).
    """
    place, clock, rng = place_of(store), SystemClock(), SystemRng()
    if "://" not in place and not Path(place, "rows").is_dir():
        raise InvalidError("there is no store at this path", path=store)
    objects = open_objects(f"{place}/rows", read_options(storage_options))
    with _leases(place, objects, zookeeper) as leases:
        # Looked at before the table: a query that runs meanwhile is not taken to be ahead of it.
        reached = {} if "://" in place else reached_batches(Path(place) / "checkpoints")
        plan = plan_repair(objects, leases.high_water.read())
        ahead = {
            query: at
            for query, at in plan.consumed().items()
            if query in reached and reached[query].is_ahead_of(at)
        }
        _describe(plan, place, ahead)
        if dry_run and (plan.is_needed or ahead):
            raise SystemExit(1)
        if (plan.is_needed or ahead) and not yes:
            click.confirm("Repair it?", abort=True)
        finish = partial(_bring_along, plan, place, objects, ahead)
        if plan.is_needed:
            committed = repair_store(objects, plan, leases, clock, rng, then=finish)
            click.echo(f"repaired: version {committed.version} holds what version {plan.state.version} held")
        elif ahead or (plan.is_after_repair and not dry_run):
            with hold_store(plan, leases):
                _check_unchanged(plan, objects)
                finish()
    if not plan.is_needed:
        click.echo("the earlier repair is finished" if ahead else _WHOLE)


def _check_unchanged(plan: RepairPlan, objects: Objects) -> None:
    newest = load(Log(objects)).version
    if newest != plan.newest:
        raise ConflictError("somebody has committed meanwhile; repair again", newest=newest)


@contextmanager
def _leases(place: str, objects: Objects, zookeeper: str | None) -> Iterator[ZooKeeperLeases]:
    """
    The store's leases and high-water mark, without opening the store, which would be refused.
    """
    clock, rng = SystemClock(), SystemRng()
    server = None
    hosts = zookeeper
    store_id = _store_id(objects)
    if hosts is None:
        if "://" in place:
            raise InvalidError("name the store's ensemble: --zookeeper host:port,…", store=place)
        server = EmbeddedZooKeeper(Path(place) / "zookeeper", clock, rng)
        hosts = server.start_or_join()
    try:
        leases = ZooKeeperLeases(hosts, store_id, rng.token(), clock)
        try:
            yield leases
        finally:
            leases.close()
    finally:
        if server is not None:
            server.close()


def _store_id(objects: Objects) -> str:
    for history in read_histories(Log(objects), None):
        if history.metadata is not None and (known := history.metadata.configuration.get(STORE_ID_KEY)):
            return known
    raise DataError("nothing of the log can be read: restore the store from a copy", store=objects.url)


def _describe(plan: RepairPlan, place: str, ahead: Mapping[str, int]) -> None:
    if not plan.is_needed:
        for query, at in sorted(ahead.items()):
            click.echo(f"the checkpoint of query {query} is ahead of the store and goes back to batch {at}")
        return
    found = [(path, "one bit is turned back", "nothing") for path in sorted(plan.healed)]
    found += [
        (each.path, f"taken again from the {len(each.sources)} files that it was compacted from", "nothing")
        for each in plan.restored
    ]
    undone = f"versions {plan.state.version + 1} to {plan.newest} are undone"
    found += [(path, undone, "what it held since then") for path in plan.lost]
    found += [(path, "set aside", "history") for path in plan.set_aside]
    print_table("", ("file", "what is done", "what is lost"), found)
    if plan.is_rollback:
        click.echo(f"the store goes back from version {plan.newest} to version {plan.state.version}")
    for app_id, (kept, was) in plan.supersteps().items():
        name = unquote(app_id.rpartition("/")[2])
        click.echo(f"pipeline {name}: supersteps {kept + 1} to {was} are undone")
        note(f"sinks of {name} keep what these gave them, and get it again")
    for app_id, (kept, was) in plan.inputs().items():
        pipeline, stream, source = map(unquote, app_id.split("/")[-3:])
        click.echo(f"input {stream} of {pipeline}: read again from position {kept + 1} (it was at {was})")
        if source not in rewind_checkpoints(Path(place) / "checkpoints", {source: kept}, dry_run=True):
            note(f"{stream} must be handed in again from there by whoever does (source {source})")
    if not plan.is_readable:
        note(f"older versions cannot be read any more; the old log goes to rows/{SET_ASIDE_FOLDER}")


def _bring_along(plan: RepairPlan, place: str, objects: Objects, ahead: Mapping[str, int]) -> None:
    """
    Take Spark's checkpoints back with the store, and write the catalog anew; again is the same as once.
    """
    batches = {unquote(app_id.rpartition("/")[2]): kept for app_id, (kept, _) in plan.inputs().items()}
    batches |= ahead
    if "://" in place:
        return
    for query in rewind_checkpoints(Path(place) / "checkpoints", batches):
        note(f"the checkpoint of query {query} was taken back to batch {batches[query]}")
    url = default_catalog_url(place)
    try:
        with Catalog.open(url, SystemClock()) as catalog:
            snapshot = load(Log(objects))
            catalog.rebuild(snapshot, logged_commits(Log(objects), snapshot.version, 1_000))
    except MillpondError as error:
        note(f"the catalog was not written anew: {error.message}")
