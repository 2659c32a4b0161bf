"""``millpond savepoint``: give a version of a store a name, under which it stays readable."""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.cli.completion import complete_savepoint
from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_read, open_to_write, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, print_json, print_table
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity


@click.command(
    cls=TeachingCommand,
    examples=(
        'millpond savepoint pond "before the upgrade"',
        "millpond savepoint pond spring --version 12",
        "millpond savepoint pond",
        'millpond sql pond "select count(*) from window_counter" --version "before the upgrade"',
        'millpond savepoint pond "before the upgrade" --drop',
    ),
)
@store_argument
@click.argument("name", required=False, shell_complete=complete_savepoint)
@click.option(
    "--version", type=click.IntRange(min=0), metavar="N", help="The version to keep; by default the newest."
)
@click.option("--drop", is_flag=True, help="Drop the savepoint: its version may be collected from now on.")
@zookeeper_options
@json_option("One JSON object per savepoint, one per line.")
def savepoint(
    store: str,
    name: str | None,
    storage_options: tuple[str, ...],
    version: int | None,
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    drop: bool,
    as_json: bool,
) -> None:
    """Keep a version of STORE readable under NAME, or list the savepoints of STORE.

    A version is a consistent picture of the whole pipeline, and can be read for as long as the retention lasts. That
    of a savepoint can be read until it is dropped. It costs the files that have been replaced since, and
    nothing of what comes between it and now. The pipeline may run meanwhile.

    The other commands take NAME where they take a --version.
    """
    if name is None:
        if drop or version is not None:
            raise InvalidError("which savepoint? give its NAME")
        with open_to_read(store, storage_options) as opened:
            known = opened.savepoints()
        if as_json:
            print_json(map(asdict, known))
        else:
            print_table("", ("savepoint", "version"), [(one.name, one.version) for one in known])
        return
    if drop and version is not None:
        raise InvalidError("a savepoint is dropped by its name alone, without --version")
    with open_to_write(store, storage_options, zookeeper, zookeeper_security) as written:
        if drop:
            written.drop_savepoint(name)
            said, done = f"dropped: {name}", {"name": name, "dropped": True}
        else:
            made = written.savepoint(name, version)
            said, done = f"version {made.version} is kept as {made.name}", asdict(made)
    if as_json:
        print_json([done])
    else:
        click.echo(said)
