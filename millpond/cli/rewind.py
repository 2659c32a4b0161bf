"""``millpond rewind``: take a whole store back to one of its versions."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import click

from millpond.cli.completion import complete_savepoint
from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import read_options, store_argument, version_in, zookeeper_options
from millpond.cli.terminal.output import json_option, note, progress_bar, result_as_json
from millpond.cli.terminal.restoring import (
    describe_undone,
    queries_ahead,
    store_leases,
    store_mark,
    table_to_restore,
    take_dependents_back,
    undone,
)
from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import RepairPlan, plan_rewind, sinks_of_rewind
from millpond.executor.replay.spark_checkpoint import reached_batches
from millpond.executor.sinks.delta_upsert import TakenBack, take_back_sink
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, security_of
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import store_id_of
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects, TableVersion


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond rewind pond --version 12 --dry-run",
        'millpond rewind pond --version "before the sale"',
        "millpond rewind pond --version 12 --take-back out/spikes --yes",
    ),
)
@store_argument
@click.option(
    "--version", "named", required=True, metavar="N|NAME", shell_complete=complete_savepoint,
    help="The version to go back to, or its savepoint.",
)  # fmt: skip
@click.option(
    "--take-back", "sinks", metavar="TABLE", multiple=True,
    help="A sink's Delta table that goes back too; may be repeated.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Report what would be undone, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@zookeeper_options
@json_option("One JSON object: what was undone, or would be.")
def rewind(
    store: str,
    storage_options: tuple[str, ...],
    named: str,
    sinks: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Take STORE back to an older version: rows, timers, record ids and input positions of all computations together.

    It is a commit like any other: the versions that are undone stay readable, so you can rewind to one of them
    again. Checkpoints of Spark's queries that lie in the store's folder go back with it. The pipelines then read
    their input again from where they were at that version, with the same code or other code.

    What the undone supersteps delivered to sinks stays there, and is delivered again, unless you name the sink's table
    with --take-back: then what they delivered is removed from it, if no other writer has changed the same files since.

    Stop the pipelines of the store before. If a rewind is killed, run it again to finish it.
    """
    clock, rng, options = SystemClock(), SystemRng(), read_options(storage_options)
    root, objects = table_to_restore(store, options)
    with (
        result_as_json(as_json) as result,
        store_leases(root, objects, zookeeper, security_of(zookeeper, zookeeper_security)) as leases,
    ):
        reached = {} if "://" in root else reached_batches(Path(root) / "checkpoints")
        snapshot = load(Log(objects))
        version = TableVersion(version_in(open_savepoints(snapshot.txns), named))
        with progress_bar("reading the log"):
            plan = plan_rewind(objects, version, store_mark(root, objects, options, leases))
        result |= {"store": store, "dry_run": dry_run, **undone(plan), "committed": None, "sinks": []}
        click.echo(f"the store goes back from version {plan.newest} to version {version}")
        describe_undone(plan, root)
        if dry_run:
            return
        if not yes:
            click.confirm("Rewind it?", abort=True)
        finish = partial(take_dependents_back, plan, root, objects, queries_ahead(plan, reached))
        with progress_bar("rewinding"):
            committed = repair_store(objects, plan, leases, clock, rng, then=finish)
        result["committed"] = committed.version
        click.echo(f"rewound: version {committed.version} holds what version {version} held")
        lineage = Lineage.of(store_id_of(snapshot), snapshot.txns)
        for sink in sinks:
            taken = _take_back(open_objects(sink, options), sink, lineage, plan)
            result["sinks"] += [{"table": sink, **asdict(part)} for part in taken]
        if not sinks:
            for app_id in plan.supersteps():
                name = unquote(app_id.rpartition("/")[2])
                note(f"sinks of {name} keep the output of the undone supersteps, and receive it again")


def _take_back(table: Objects, sink: str, lineage: Lineage, plan: RepairPlan) -> tuple[TakenBack, ...]:
    taken = take_back_sink(table, lineage, sinks_of_rewind(plan), SystemClock(), SystemRng())
    for part in taken:
        click.echo(
            f"sink {part.name} of {part.pipeline}: back from superstep {part.delivered} to "
            f"{part.superstep}, {part.files} files removed"
        )
    if not taken:
        click.echo(f"{sink} has nothing of the undone supersteps")
    return taken
