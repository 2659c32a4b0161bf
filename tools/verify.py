"""
``millpond verify``: is every byte of the store what was written?
"""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.statestore.errors import UnavailableError
from millpond.statestore.integrity.verification import Verified, verify_store
from millpond.statestore.log.high_water import Mark
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.zookeeper.mark import ask_for_mark, server_beside
from millpond.tools.cli_help import TeachingCommand
from millpond.tools.opening import open_to_read, store_argument
from millpond.tools.output import note, number_text, print_json, print_table

__all__ = ["verify"]


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond verify pond",
        "millpond verify pond --json | jq .path",
        "millpond verify s3://bucket/pond --zookeeper zk1:2181,zk2:2181",
    ),
)
@store_argument
@click.option("--zookeeper", metavar="HOSTS", help="Where the high-water mark is, unless beside the store.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a finding, a line each.")
@click.pass_context
def verify(
    context: click.Context,
    store: str,
    storage_options: tuple[str, ...],
    zookeeper: str | None,
    *,
    as_json: bool,
) -> None:
    """
    Read all of STORE and say what is damaged.

    Looks at every commit file (its seal, that each is built on the one before, that fences and positions
    move by the rules), at every checkpoint, at every live file (its seal and checksums, and that its rows are
    what the log says of them), and at the high-water mark, if ZooKeeper answers: it tells
    when the newest commits are missing. Names each bad file and what it held.

    The exit code is 0 for a sound store, 1 for a damaged one. Nothing is changed.
    """
    with open_to_read(store, storage_options, check_mark=False) as opened:
        mark = _read_mark(opened, zookeeper)
        found = verify_store(opened.objects, mark)
    if as_json:
        print_json(asdict(finding) for finding in found.findings)
    else:
        _print(found)
    context.exit(1 if found.findings else 0)


def _print(found: Verified) -> None:
    if found.findings:
        rows = [(each.path, each.held, each.fault) for each in found.findings]
        print_table("", ("file", "held", "fault"), rows)
    words = (
        f"{number_text(found.commits)} commits, {number_text(found.checkpoints)} checkpoints, "
        f"{number_text(found.files)} files with {number_text(found.rows)} row updates"
    )
    verdict = f"{len(found.findings)} damaged" if found.findings else "sound"
    click.echo(f"{verdict}: {words}")


def _read_mark(store: Store, zookeeper: str | None) -> Mark | None:
    hosts = zookeeper or server_beside(store.path)
    if hosts is None:
        note("the high-water mark is not looked at: no ZooKeeper runs beside the store")
        return None
    try:
        return ask_for_mark(hosts, store.store_id, SystemClock())
    except UnavailableError as error:
        note(f"the high-water mark is not looked at: {error.message}")
        return None
