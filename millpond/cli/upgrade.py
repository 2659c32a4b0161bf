"""``millpond upgrade``: the states that earlier code wrote, brought up to today's code."""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.cli.terminal.apps import load_pipeline, wrong_usage
from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_write, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, note, print_json, print_table, progress_bar
from millpond.executor.maintenance.offline_upgrade import Upgraded, upgrade_offline
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.system import SystemClock, SystemRng


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond upgrade pond --app flights:pipeline --dry-run",
        "millpond upgrade pond --app flights:pipeline",
        "millpond upgrade pond --app flights:pipeline --json",
    ),
    exit_codes={1: "rows that could not be upgraded, or an error, of the store, the data or a service"},
)
@store_argument
@click.option(
    "--app", required=True, metavar="MODULE:PIPELINE",
    help="The pipeline, or a function that returns it; modules of the current folder are found.",
)  # fmt: skip
@click.option(
    "--computation", "computations", metavar="C", multiple=True,
    help="Only this computation's rows; may be repeated.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Call the code for every row, and change nothing.")
@zookeeper_options
@json_option("One JSON object per computation, one per line.")
@click.pass_context
def upgrade(
    context: click.Context,
    store: str,
    storage_options: tuple[str, ...],
    app: str,
    computations: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upgrade the rows of STORE whose state was written by code with a lower state_version.

    A running pipeline upgrades a row when its code asks for the row's state. This command does the same for all
    rows that are left, with the upgrade_state of your code, so that the code may forget the earlier versions.
    Stop the pipeline before. Timers, record ids and watermarks stay what they are.

    Rows are upgraded some thousands at a time, each in a commit. If it is killed, run it again: it goes on where it
    was. A row whose upgrade fails stays as it is, and the first ones are named; the exit code is 1 then. With
    --dry-run nothing is taken or written, and the pipeline may run.
    """
    with wrong_usage():
        topology = load_pipeline(app).check()
    clock, rng = SystemClock(), SystemRng()
    with open_to_write(
        store, storage_options, zookeeper, zookeeper_security, read_only=dry_run, clock=clock, rng=rng
    ) as opened:
        names = set(computations) or {
            name for name, node in topology.computations.items() if node.computation.state_version
        }
        updates, seen = _updates_of(opened.snapshot(), names), 0

        def tell(more: int) -> None:
            nonlocal seen
            seen += more
            told(seen, updates)

        with progress_bar("upgrading row updates") as told:
            done = upgrade_offline(
                opened, topology, clock, rng, computations=computations, dry_run=dry_run, on_progress=tell
            )
    if as_json:
        print_json({**asdict(one), "failures": dict(one.failures)} for one in done)
    else:
        _print(done, dry_run=dry_run)
    context.exit(1 if any(one.failed for one in done) else 0)


def _updates_of(snapshot: Snapshot, names: set[str]) -> int:
    return sum(file.num_records or 0 for name in names for file in snapshot.files_in(name))


def _print(done: list[Upgraded], *, dry_run: bool) -> None:
    rows = [(one.computation, one.state_version, one.rows, one.current, one.failed) for one in done]
    went = "would be upgraded" if dry_run else "upgraded"
    print_table("", ("computation", "state_version", went, "up to date", "failed"), rows)
    for one in done:
        for key, reason in one.failures:
            note(f"{one.computation} {key}: {reason}")
    if not done:
        note("no computation of the pipeline declares a state_version")
