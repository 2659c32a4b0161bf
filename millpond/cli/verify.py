"""``millpond verify``: check that every byte of a store is as it was written."""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.cli.terminal.cli_help import Example, TeachingCommand
from millpond.cli.terminal.opening import open_to_read, read_stored_mark, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, note, number_text, print_json, print_table, progress_bar
from millpond.statestore.errors import UnavailableError
from millpond.statestore.history.verification import Verified, verify_store
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity, security_of
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.log.high_water import Mark, later_mark
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond verify pond",
        "millpond verify pond --json | jq .path",
        Example(
            "millpond verify s3://bucket/pond --zookeeper zk1:2181,zk2:2181",
            not_run="a bucket and an ensemble",
        ),
    ),
    exit_codes={0: "the store is sound", 1: "the store is damaged, or an error"},
)
@store_argument
@zookeeper_options
@json_option("One JSON object per finding, one per line.")
@click.pass_context
def verify(
    context: click.Context,
    store: str,
    storage_options: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    as_json: bool,
) -> None:
    """Read all of STORE and report damage.

    The command checks every commit file (its seal, that it is built on the commit before it, that fences and
    positions follow the rules), every checkpoint, every live file (its seal and checksums, and that its rows
    match the log), and the high-water marks, that in the store's folder and, if ZooKeeper answers, the one
    there: they show whether the newest commits are missing. The report names each damaged file and its contents.

    Nothing is changed.
    """
    with open_to_read(store, storage_options, check_mark=False) as opened:
        mark = _read_mark(opened, zookeeper, zookeeper_security)
        with progress_bar("reading files") as told:
            verified = verify_store(opened.objects, mark, on_progress=told)
    if as_json:
        print_json(asdict(finding) for finding in verified.findings)
    else:
        _print(verified)
    context.exit(1 if verified.findings else 0)


def _print(verified: Verified) -> None:
    if verified.findings:
        rows = [(finding.path, finding.held, finding.fault) for finding in verified.findings]
        print_table("", ("file", "held", "fault"), rows)
    counts = (
        f"{number_text(verified.commits)} commits, {number_text(verified.checkpoints)} checkpoints, "
        f"{number_text(verified.files)} files with {number_text(verified.rows)} row updates"
    )
    verdict = f"{len(verified.findings)} damaged" if verified.findings else "sound"
    click.echo(f"{verdict}: {counts}")


def _read_mark(store: Store, zookeeper: str | None, given: ZooKeeperSecurity | None) -> Mark | None:
    security = security_of(zookeeper, given)
    stored = read_stored_mark(store)
    hosts = zookeeper or local_server(store.path)
    if hosts is None:
        if stored is None:
            note("the high-water mark is not checked: the store's ZooKeeper server is not running")
        return stored
    try:
        return later_mark(stored, ask_for_mark(hosts, store.lineage.current.id, SystemClock(), security))
    except UnavailableError as error:
        note(f"the high-water mark of ZooKeeper is not checked: {error.message}")
        return stored
