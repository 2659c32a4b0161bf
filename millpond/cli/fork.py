"""``millpond fork``: a store of its own that begins with a version of another one."""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_read, store_argument, version_in, version_option
from millpond.cli.terminal.output import json_option, progress_bar, result_as_json, size_text
from millpond.executor.replay.fork import fork_store


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond fork pond what_if",
        "millpond fork pond as_of_12 --version 12",
        'millpond fork pond without_the_sale --version "before the sale" --json | jq .version',
    ),
)
@store_argument
@click.argument("new")
@version_option
@json_option("One JSON object: what was forked.")
def fork(
    store: str, new: str, storage_options: tuple[str, ...], version: str | None, *, as_json: bool
) -> None:
    """Make a store at NEW that begins with a version of STORE: rows, timers, record ids and input positions.

    The pipeline of STORE may run meanwhile. NEW is a store of its own, with leases and versions of its own, which count
    on from those of STORE. On the same disk no row is copied: files have two names then, and each store deletes its own.
    Checkpoints of Spark's queries that lie in the folder of STORE are copied and taken back to that version.

    Start a pipeline on NEW, with the same code or other code. Its sinks are tables in NEW/sinks, in place of those that
    STORE has written, and begin with what STORE had delivered by that version.
    """
    with (
        result_as_json(as_json) as result,
        open_to_read(store, storage_options) as opened,
        progress_bar("forking row files") as told,
    ):
        at = None if version is None else version_in(opened.savepoints(), version)
        made = fork_store(opened, new, at, told=told)
        result |= {"store": store, "path": new, **asdict(made)}
    if as_json:
        return
    copied = f", {made.copied} of them copied" if made.copied else ""
    click.echo(
        f"forked: {new} begins with version {made.version} of {store} "
        f"({made.files} files, {size_text(made.size_bytes)}{copied})"
    )
