"""What ``millpond repair`` and ``millpond rewind`` share: a store is held, and what depends on it goes back with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click

from millpond.cli.terminal.output import note
from millpond.executor.replay.repair_plan import RepairPlan
from millpond.executor.replay.spark_checkpoint import Reached, by_query, rewind_checkpoints
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.engine import default_catalog_url
from millpond.statestore.errors import DataError, InvalidError, MillpondError
from millpond.statestore.history.lineage import NO_STORE, ROWS_FOLDER, Lineage, place_of
from millpond.statestore.history.replayed_log import read_histories
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.log.high_water import Mark, later_mark, list_marks, newest_mark
from millpond.statestore.log.log import Log
from millpond.statestore.log.table import STORE_ID_KEY
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.opening import rebuild_catalog
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects


def table_to_restore(store: str, options: Mapping[str, str]) -> tuple[str, Objects]:
    """Where a store lies, and the root of its table.

    Raises:
        InvalidError: there is no store at the path.
    """
    root = place_of(store)
    if "://" not in root and not Path(root, ROWS_FOLDER).is_dir():
        raise InvalidError(NO_STORE, path=store)
    return root, open_objects(f"{root}/{ROWS_FOLDER}", options)


@contextmanager
def store_leases(
    root: str, objects: Objects, zookeeper: str | None, security: ZooKeeperSecurity
) -> Iterator[ZooKeeperLeases]:
    """The store's leases and high-water mark; `Store.open` would refuse a damaged store.

    Raises:
        InvalidError: a store in an object store is named without its ensemble.
        UnavailableError: ZooKeeper does not respond.
    """
    clock, rng = SystemClock(), SystemRng()
    server = None
    hosts = zookeeper
    lineage = _lineage(objects)
    if hosts is None:
        if "://" in root:
            raise InvalidError("name the store's ensemble: --zookeeper host:port,…", store=root)
        server = EmbeddedZooKeeper(Path(root) / "zookeeper", clock, rng)
        hosts = server.start_or_join()
    try:
        leases = ZooKeeperLeases(hosts, lineage.current.id, rng.token(), clock, security=security)
        try:
            yield leases
        finally:
            leases.close()
    finally:
        if server is not None:
            server.close()


def _lineage(objects: Objects) -> Lineage:
    for history in read_histories(Log(objects), None):
        if history.metadata is not None and (known := history.metadata.configuration.get(STORE_ID_KEY)):
            return Lineage.of(known, history.state.txns)
    raise DataError("nothing of the log can be read: restore the store from a copy", store=objects.url)


def store_mark(
    root: str, objects: Objects, options: Mapping[str, str], leases: ZooKeeperLeases
) -> Mark | None:
    """The newest of the high-water marks in ZooKeeper and in the store's folder.

    Raises:
        DataError: another incarnation took the place of this store.
        UnavailableError: a service does not respond.
    """
    known = [incarnation.id for incarnation in _lineage(objects).incarnations]
    mark = later_mark(leases.high_water.read(), newest_mark(list_marks(open_objects(root, options)), known))
    if mark is not None and mark.successor:
        raise DataError(
            "another incarnation took the place of this store: repair that one, or go on with this as a copy "
            "(`millpond adopt STORE --as copy`)",
            store=root,
            successor=mark.successor,
        )
    return mark


def describe_undone(plan: RepairPlan, root: str) -> None:
    """Print which supersteps of which pipelines are undone, and from where their inputs are read again."""
    for app_id, (kept, was) in plan.supersteps().items():
        name = unquote(app_id.rpartition("/")[2])
        click.echo(f"pipeline {name}: supersteps {kept + 1} to {was} are undone")
    for app_id, (kept, was) in plan.inputs().items():
        pipeline, stream, source = map(unquote, app_id.split("/")[-3:])
        click.echo(f"input {stream} of {pipeline}: read again from position {kept + 1} (it was at {was})")
        if source not in rewind_checkpoints(Path(root) / "checkpoints", {source: kept}, dry_run=True):
            note(f"inject {stream} again from that position (source {source})")


def undone(plan: RepairPlan) -> dict[str, Any]:
    """Which versions, supersteps and input positions a plan undoes, for JSON."""
    supersteps = [
        {"pipeline": unquote(app_id.rpartition("/")[2]), "superstep": kept, "was": was}
        for app_id, (kept, was) in plan.supersteps().items()
    ]
    inputs = []
    for app_id, (kept, was) in plan.inputs().items():
        pipeline, stream, source = map(unquote, app_id.split("/")[-3:])
        inputs.append({"pipeline": pipeline, "input": stream, "source": source, "batch": kept, "was": was})
    return {
        "newest": plan.newest,
        "version": plan.state.version,
        "supersteps": supersteps,
        "inputs": inputs,
    }


def queries_ahead(plan: RepairPlan, reached: Mapping[str, Reached]) -> dict[str, int]:
    """The queries whose checkpoints are ahead of the store after a plan, and the batch that each goes back to.

    Args:
        plan: the plan.
        reached: how far each query's checkpoint is.
    """
    return {
        query: at
        for query, at in plan.consumed().items()
        if query in reached and reached[query].is_ahead_of(at)
    }


def take_dependents_back(plan: RepairPlan, root: str, objects: Objects, ahead: Mapping[str, int]) -> None:
    """Take Spark's checkpoints back to the store's state, and rebuild the catalog; to repeat it changes nothing.

    Args:
        plan: what was done.
        root: the store's location.
        objects: the root of its table.
        ahead: further queries whose checkpoints go back, and to which batch.
    """
    batches = {unquote(app_id.rpartition("/")[2]): kept for app_id, (kept, _) in plan.inputs().items()}
    batches |= ahead
    if "://" in root:
        return
    offsets = by_query(plan.source_offsets)
    for query in rewind_checkpoints(Path(root) / "checkpoints", batches, offsets=offsets):
        note(f"the checkpoint of query {query} was taken back to batch {batches[query]}")
    url = default_catalog_url(root)
    try:
        with Catalog.open(url, SystemClock()) as catalog:
            rebuild_catalog(catalog, Log(objects))
    except MillpondError as error:
        note(f"the catalog was not rebuilt: {error.message}")
