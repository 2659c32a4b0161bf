"""``millpond adopt``: say what a store is that was moved, copied or restored from a backup."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final, cast

import click

from millpond.cli.terminal.cli_help import Example, TeachingCommand
from millpond.cli.terminal.opening import read_options, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, result_as_json
from millpond.executor.sinks.delta_table import take_back_sink
from millpond.statestore.app_ids import supersteps_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import Adoption
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng

_KINDS: Final = ("moved", "copy", "restored")


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond adopt pond --as moved",
        "millpond adopt pond_of_today --as copy",
        "millpond adopt pond --as restored --take-back out/spikes",
        Example(
            "millpond adopt s3://bucket/pond --as restored --zookeeper zk1:2181,zk2:2181",
            not_run="a bucket and an ensemble",
        ),
    ),
)
@store_argument
@click.option("--as", "kind", type=click.Choice(_KINDS), required=True, help="What the store is now.")
@click.option(
    "--take-back",
    "sinks",
    metavar="TABLE",
    multiple=True,
    help="A sink's Delta table to take back to where the store is; may be repeated.",
)
@zookeeper_options
@json_option("One JSON object: which incarnation the store is now, and the sinks that were taken back.")
def adopt(
    store: str,
    kind: str,
    storage_options: tuple[str, ...],
    sinks: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    as_json: bool,
) -> None:
    """Say what STORE is, when it is no longer what it was.

    A store that lies elsewhere than it did, or that is older than its sinks, is refused until you say why:

    moved: the folder was moved or renamed, and there is no other. Everything goes on.

    copy: the original goes on. This store goes its own way, with leases of its own. It is refused by the sinks
    of the original: give its pipeline other ones.

    restored: this is an older copy, a backup say, that takes the place of a store that was lost. Input is consumed
    again from where the copy stands, if its sources still have it. Sinks that are ahead of the copy are refused: write to new
    ones, or take them back with --take-back, which removes what later supersteps delivered.

    Stop the pipelines of the store before.
    """
    if sinks and kind != "restored":
        raise InvalidError("only for a restored store a sink is taken back", adopt=kind)
    options = read_options(storage_options)
    clock, rng = SystemClock(), SystemRng()
    with (
        result_as_json(as_json) as result,
        Store.open(
            store,
            zookeeper=zookeeper,
            zookeeper_security=zookeeper_security,
            storage_options=options,
            create=False,
            adopt=cast(Adoption, kind),
            clock=clock,
            rng=rng,
        ) as opened,
    ):
        lineage = opened.lineage
        supersteps = supersteps_of(opened.committer.snapshot.txns)
        click.echo(f"adopted as {kind}: incarnation {lineage.current.id} of store {lineage.store_id}")
        result |= {
            "store": store,
            "store_id": lineage.store_id,
            "incarnation": lineage.current.id,
            "origin": lineage.current.origin,
            "sinks": [],
        }
        for sink in sinks:
            taken = take_back_sink(open_objects(sink, options), lineage, supersteps, clock, rng)
            result["sinks"] += [{"table": sink, **asdict(part)} for part in taken]
            for part in taken:
                click.echo(
                    f"sink {part.name} of {part.pipeline}: back from superstep {part.delivered} to "
                    f"{part.superstep}, {part.files} files removed"
                )
            if not taken:
                click.echo(f"{sink} is not ahead of the store")
