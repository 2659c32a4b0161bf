"""``millpond gc``: collect garbage offline.

The module is not called ``gc``, so that it is never confused with CPython's own.
"""

from __future__ import annotations

import click

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.opening import open_to_write, store_argument, zookeeper_options
from millpond.cli.terminal.output import json_option, note, print_json, print_table, progress_bar, size_text
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.round import CollectionRound
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.system import SystemClock, SystemRng


@click.command(
    "gc",
    cls=TeachingCommand,
    examples=(
        "millpond gc pond --dry-run",
        "millpond gc pond --keep 10m",
        "millpond gc pond --json | jq .kind",
    ),
)
@store_argument
@click.option("--dry-run", is_flag=True, help="Report what would be deleted, and change nothing.")
@click.option(
    "--keep", default="1h", show_default=True, metavar="DURATION",
    help="How long a version stays readable after it was replaced.",
)  # fmt: skip
@zookeeper_options
@click.option("--catalog", metavar="URL", help="SQLAlchemy URL of the catalog, unless in the store's folder.")
@json_option("One JSON object per kind of garbage, one per line.")
def collect(
    store: str,
    storage_options: tuple[str, ...],
    keep: str,
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    catalog: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Collect garbage in STORE.

    Running pipelines collect their garbage themselves, a little at a time. Use this command for a store
    without a running pipeline. It compacts each interval's files into one (dropping overridden updates,
    delivered productions, expired record ids and deleted rows), writes a checkpoint, and deletes files
    that no version since --keep needs, row files that no commit ever named, and old commits behind a
    checkpoint.

    Versions that open savepoints and live readers need stay readable. Intervals that a running
    pipeline holds are not compacted. The command is refused while `millpond repair` or another `millpond gc`
    is running. If it is killed midway, it leaves garbage but no damage. With --dry-run it only
    reads: it takes no lease, starts no ZooKeeper, and may be used while pipelines run.
    """
    policy = UpkeepPolicy(retention=keep, collect_every=1)
    clock, rng = SystemClock(), SystemRng()
    with (
        open_to_write(
            store,
            storage_options,
            zookeeper,
            zookeeper_security,
            catalog=catalog,
            read_only=dry_run,
            clock=clock,
            rng=rng,
        ) as opened,
        progress_bar("collecting garbage"),
    ):
        result = collect_offline(opened, clock, rng, policy, dry_run=dry_run)
    if as_json:
        print_json(_entries(result))
    else:
        _print(result, dry_run=dry_run)


def _entries(result: CollectionRound) -> list[dict[str, object]]:
    return [
        {
            "kind": collection.kind,
            "files": len(collection.paths),
            "made": len(collection.made),
            "freed_bytes": collection.freed_bytes,
            "skipped": list(collection.skipped),
            "paths": list(collection.paths),
            "horizon": result.horizon,
            "held_by": result.held_by,
        }
        for collection in result.collections
    ]


def _print(result: CollectionRound, *, dry_run: bool) -> None:
    rows = [
        (collection.kind, len(collection.paths), len(collection.made), size_text(collection.freed_bytes))
        for collection in result.collections
    ]
    went = "would go" if dry_run else "gone"
    print_table("", ("kind", f"files {went}", "files made", "bytes"), rows)
    for collection in result.collections:
        for reason in collection.skipped:
            note(reason)
    click.echo(f"versions from {result.horizon} on stay readable ({result.held_by})")
