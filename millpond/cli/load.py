"""``millpond load``: make rows of a computation of a file."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

import click

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_write, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, print_json, size_text, stages_bar
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.rows.codec import BytesCodec, Codec, JsonCodec, MsgpackCodec

_CODECS: Final[dict[str, Codec]] = {"json": JsonCodec(), "msgpack": MsgpackCodec(), "bytes": BytesCodec()}


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond load pond counts counts.parquet",
        "millpond load pond visits counts.jsonl --intervals 8",
        "millpond load new_pond counts counts.csv --create --json | jq .rows",
    ),
)
@store_argument
@click.argument("computation")
@click.argument("file", type=click.Path())
@click.option(
    "--intervals", type=click.IntRange(min=1), metavar="N",
    help="Into how many key intervals its keys are cut, if the computation has none yet.",
)  # fmt: skip
@click.option(
    "--codec", "codec_name", type=click.Choice(sorted(_CODECS)), default="json", show_default=True,
    help="The computation's codec.",
)  # fmt: skip
@click.option(
    "--state-version", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
    help="The state_version of the code whose states these are.",
)  # fmt: skip
@click.option("--create", is_flag=True, help="Create the store if there is none.")
@zookeeper_options
@json_option("Print the result as a JSON object.")
def load(
    store: str,
    computation: str,
    file: str,
    storage_options: tuple[str, ...],
    intervals: int | None,
    codec_name: str,
    state_version: int,
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    create: bool,
    as_json: bool,
) -> None:
    """Make rows of COMPUTATION of FILE (Parquet, CSV or JSON), in one commit: the state and timers that it begins with.

    The file has a column `key`, and `state`, `timers` or both. In CSV and JSON a state is JSON; in Parquet it is a
    value, or JSON text. Timers are lists of objects with `at` (microseconds since 1970 UTC, or a time with a zone),
    and where needed `tag`, `domain` (`event` or `wall`) and `output_at`; in CSV they are JSON too.

    The computation must have no rows, and no pipeline that has it may be running. If the command is killed, the store
    has all of the rows or none, and you can run it again.
    """
    with (
        open_to_write(store, storage_options, zookeeper, zookeeper_security, create=create) as opened,
        stages_bar("rows", ("read", "write")) as told,
    ):
        loaded = opened.load(
            computation,
            file,
            codec=_CODECS[codec_name],
            state_version=state_version,
            intervals=intervals,
            told=told,
        )
    if as_json:
        print_json([asdict(loaded)])
        return
    click.echo(
        f"version {loaded.version} has {loaded.rows:,} rows of {computation}: "
        f"{loaded.intervals} intervals, {loaded.files} files, {size_text(loaded.size_bytes)}"
    )
