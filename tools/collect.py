"""
``millpond gc``: take garbage away by hand.

The module is not called ``gc``, so that nothing can ever be taken for CPython's own.
"""

from __future__ import annotations

import click

from millpond.executor.maintenance.offline_gc import collect_by_hand
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.round import CollectionRound
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.tools.cli_help import TeachingCommand
from millpond.tools.opening import read_options, store_argument
from millpond.tools.output import note, print_json, print_table, size_text

__all__ = ["collect"]


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
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option(
    "--keep", default="1h", show_default=True, metavar="DURATION",
    help="How long a version stays readable after it has been replaced.",
)  # fmt: skip
@click.option(
    "--id-slack", default="3h", show_default=True, metavar="DURATION",
    help="How far behind the low watermark record ids stay known.",
)  # fmt: skip
@click.option("--zookeeper", metavar="HOSTS", help="The store's ensemble, unless it runs beside the store.")
@click.option("--catalog", metavar="URL", help="SQLAlchemy URL of the catalog, unless in the store's folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a kind of garbage, a line each.")
def collect(
    store: str,
    storage_options: tuple[str, ...],
    keep: str,
    id_slack: str,
    zookeeper: str | None,
    catalog: str | None,
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """
    Take the garbage of STORE away.

    Running pipelines do this by themselves, a little at a time. By hand it is for a store that nothing runs
    on. It compactions each interval's files into one (what newer updates override, delivered productions,
    expired record ids and deleted rows go), writes a checkpoint, and deletes files that no version
    since --keep needs, row files that no commit ever named, and old commits behind a checkpoint.

    Versions that open savepoints and live readers need stay readable. Intervals that a running
    pipeline holds are not compacted. It is refused while `millpond repair`, or another `millpond gc`, is at
    work. Killed midway, it leaves garbage and no damage. With --dry-run it only
    reads: it takes no lease, starts no ZooKeeper, and may be used while pipelines run.
    """
    policy = UpkeepPolicy(retention=keep, id_slack=id_slack, collect_every=1)
    clock, rng = SystemClock(), SystemRng()
    with Store.open(
        store,
        zookeeper=zookeeper,
        catalog=catalog,
        storage_options=read_options(storage_options),
        create=False,
        read_only=dry_run,
        clock=clock,
        rng=rng,
    ) as opened:
        found = collect_by_hand(opened, clock, rng, policy, dry_run=dry_run)
    if as_json:
        print_json(_entries(found))
    else:
        _print(found, dry_run=dry_run)


def _entries(found: CollectionRound) -> list[dict[str, object]]:
    return [
        {
            "kind": each.kind,
            "files": len(each.paths),
            "made": len(each.made),
            "freed_bytes": each.freed_bytes,
            "skipped": list(each.skipped),
            "paths": list(each.paths),
        }
        for each in found.collections
    ]


def _print(found: CollectionRound, *, dry_run: bool) -> None:
    rows = [
        (each.kind, len(each.paths), len(each.made), size_text(each.freed_bytes))
        for each in found.collections
    ]
    went = "would go" if dry_run else "gone"
    print_table("", ("kind", f"files {went}", "files made", "bytes"), rows)
    for each in found.collections:
        for reason in each.skipped:
            note(reason)
    click.echo(f"versions from {found.horizon} on stay readable ({found.held_by})")
