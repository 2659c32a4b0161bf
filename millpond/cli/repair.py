"""``millpond repair``: restore a damaged store to a whole state, as far as its bytes allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import click

from millpond.cli.terminal.cli_help import Example, TeachingCommand
from millpond.cli.terminal.opening import read_options, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, note, print_table, progress_bar, result_as_json
from millpond.cli.terminal.restoring import (
    describe_undone,
    queries_ahead,
    store_leases,
    store_mark,
    table_to_restore,
    take_dependents_back,
    undone,
)
from millpond.executor.replay.repair import SET_ASIDE_FOLDER, hold_store, repair_store
from millpond.executor.replay.repair_plan import RepairPlan, plan_repair
from millpond.executor.replay.spark_checkpoint import reached_batches
from millpond.statestore.errors import ConflictError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, security_of
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects

_WHOLE: Final = "the store is whole: there is nothing to repair"


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond repair pond --dry-run",
        "millpond repair pond",
        Example(
            "millpond repair s3://bucket/pond --zookeeper zk1:2181,zk2:2181 --yes",
            not_run="a bucket and an ensemble",
        ),
    ),
    exit_codes={
        0: "the store is whole",
        1: "it is not; with --dry-run: there is something to repair; or an error",
    },
)
@store_argument
@click.option("--dry-run", is_flag=True, help="Report what would be done, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@zookeeper_options
@json_option("One JSON object: what was done, or would be.")
@click.pass_context
def repair(
    context: click.Context,
    store: str,
    storage_options: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Repair a damaged STORE.

    Run `millpond verify` first: it reports the damage. Repair then proceeds in this order: it restores a
    flipped bit where a seal proves the result; it replaces a compaction's output by the files that it was
    made from, if they still exist; otherwise it rolls the whole store back to its newest whole version,
    state and input positions together, so that input consumed since is read again from its source. Files
    that cannot stay in the log are copied aside first. The command reports its plan and any loss, and asks
    for confirmation.

    Stop the pipelines of the store before. Afterwards `millpond verify` finds no damage; start the pipelines
    again to continue. Output that undone supersteps delivered to sinks stays there, and is delivered again.
    If a repair is killed, run it again to finish it.
    """
    clock, rng, options = SystemClock(), SystemRng(), read_options(storage_options)
    root, objects = table_to_restore(store, options)
    with (
        result_as_json(as_json) as result,
        store_leases(root, objects, zookeeper, security_of(zookeeper, zookeeper_security)) as leases,
    ):
        # Read before the table, so that a query that is still running does not seem to be ahead of it.
        reached = {} if "://" in root else reached_batches(Path(root) / "checkpoints")
        with progress_bar("reading the store"):
            plan = plan_repair(objects, store_mark(root, objects, options, leases))
        ahead = queries_ahead(plan, reached)
        result |= {"store": store, "dry_run": dry_run, **_entry(plan, ahead), "committed": None}
        _describe(plan, root, ahead)
        is_needed = plan.is_needed or bool(ahead)
        if is_needed and not yes and not dry_run:
            click.confirm("Repair it?", abort=True)
        finish = partial(take_dependents_back, plan, root, objects, ahead)
        if dry_run:
            if not is_needed:
                click.echo(_WHOLE)
        elif plan.is_needed:
            with progress_bar("repairing"):
                committed = repair_store(objects, plan, leases, clock, rng, then=finish)
            result["committed"] = committed.version
            click.echo(f"repaired: version {committed.version} holds what version {plan.state.version} held")
        else:
            if ahead or plan.is_after_repair:
                with hold_store(plan, leases):
                    _check_unchanged(plan, objects)
                    finish()
            click.echo("the earlier repair is finished" if ahead else _WHOLE)
    context.exit(1 if dry_run and is_needed else 0)


def _entry(plan: RepairPlan, ahead: Mapping[str, int]) -> dict[str, Any]:
    return {
        "is_needed": plan.is_needed or bool(ahead),
        **undone(plan),
        "healed": sorted(plan.healed),
        "restored": [asdict(file) for file in plan.restored],
        "lost": list(plan.lost),
        "set_aside": list(plan.set_aside),
        "queries": dict(ahead),
    }


def _check_unchanged(plan: RepairPlan, objects: Objects) -> None:
    newest = load(Log(objects)).version
    if newest != plan.newest:
        raise ConflictError("another process has committed meanwhile; repair again", newest=newest)


def _describe(plan: RepairPlan, root: str, ahead: Mapping[str, int]) -> None:
    if not plan.is_needed:
        for query, at in sorted(ahead.items()):
            click.echo(f"the checkpoint of query {query} is ahead of the store and goes back to batch {at}")
        return
    rows = [(path, "one bit is turned back", "nothing") for path in sorted(plan.healed)]
    rows += [
        (file.path, f"restored from the {len(file.sources)} files that it was compacted from", "nothing")
        for file in plan.restored
    ]
    undone = f"versions {plan.state.version + 1} to {plan.newest} are undone"
    rows += [(path, undone, "what it held since then") for path in plan.lost]
    rows += [(path, "set aside", "history") for path in plan.set_aside]
    print_table("", ("file", "what is done", "what is lost"), rows)
    if plan.is_rollback:
        click.echo(f"the store goes back from version {plan.newest} to version {plan.state.version}")
    describe_undone(plan, root)
    for app_id in plan.supersteps():
        note(
            f"sinks of {unquote(app_id.rpartition('/')[2])} keep the output of these supersteps, and receive it again"
        )
    if not plan.is_readable:
        note(f"older versions become unreadable; the old log is copied to rows/{SET_ASIDE_FOLDER}")
