"""``millpond gc``, ``upgrade`` and ``verify``: the upkeep of a store."""

from __future__ import annotations

from dataclasses import asdict

import click

from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.inputs import load_pipeline, wrong_usage
from millpond.cli.terminal.opening import StoreAt, store_argument, zookeeper_options
from millpond.cli.terminal.options import catalog_option, flag, json_option, option, several
from millpond.cli.terminal.output import note, print_rows, progress_bar, say, size_text
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.offline_upgrade import upgrade_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.leases.zookeeper_client import security_of
from millpond.statestore.leases.zookeeper_high_water import ask_for_mark, local_server
from millpond.statestore.leases.zookeeper_server import local_security
from millpond.statestore.log.high_water import Mark, later_mark, list_marks, newest_mark
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng


@command("millpond gc pond --dry-run", "millpond gc pond --keep 10m", "millpond gc pond --json | jq .kind")
@store_argument
@flag("--dry-run", "Report what would be deleted, and change nothing.")
@option("--keep=DURATION", "How long a version stays readable after it was replaced.", default="1h")
@zookeeper_options
@catalog_option
@json_option("One JSON object per kind of garbage, one per line.")
def gc(store: StoreAt, keep: str, catalog: str | None, *, dry_run: bool, as_json: bool) -> None:
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
    opening = store.to_write(catalog=catalog, read_only=dry_run, clock=clock, rng=rng)
    with opening as opened, progress_bar("collecting garbage"):
        result = collect_offline(opened, clock, rng, policy, dry_run=dry_run)
    collected = [
        {
            "kind": one.kind,
            "files": len(one.paths),
            "made": len(one.made),
            "freed_bytes": one.freed_bytes,
            "skipped": list(one.skipped),
            "paths": list(one.paths),
            "horizon": result.horizon,
            "held_by": result.held_by,
        }
        for one in result.collections
    ]
    rows = [
        (one.kind, len(one.paths), len(one.made), size_text(one.freed_bytes)) for one in result.collections
    ]
    columns = ("kind", f"files {'would go' if dry_run else 'gone'}", "files made", "bytes")
    print_rows(collected, columns, rows, as_json=as_json)
    if not as_json:
        for reason in (reason for one in result.collections for reason in one.skipped):
            note(reason)
        say(f"versions from {result.horizon} on stay readable ({result.held_by})")


@command(
    "millpond upgrade pond --app flights:pipeline --dry-run",
    "millpond upgrade pond --app flights:pipeline",
    "millpond upgrade pond --app flights:pipeline --json",
    exit_codes={1: "rows that could not be upgraded, or an error, of the store, the data or a service"},
)
@store_argument
@option(
    "--app=MODULE:PIPELINE",
    "The pipeline, or a function that returns it; modules of the current folder are found.",
    required=True,
)
@several("--computation=C computations", "Only this computation's rows; may be repeated.")
@flag("--dry-run", "Call the code for every row, and change nothing.")
@zookeeper_options
@json_option("One JSON object per computation, one per line.")
@click.pass_context
def upgrade(
    context: click.Context,
    store: StoreAt,
    app: str,
    computations: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Upgrade the rows of STORE whose state was written by code with a lower state_version.

    A running pipeline upgrades a row when its code asks for the row's state. This command does the same for all
    other rows, with the upgrade_state of your code, so that the code may forget the earlier versions.
    Stop the pipeline before. Timers, record ids and watermarks do not change.

    Rows are upgraded some thousands at a time, each in a commit. If it is killed, run it again: it continues where it
    was. A row whose upgrade fails is left unchanged, and the first ones are named; the exit code is 1 then. With
    --dry-run nothing is taken or written, and the pipeline may run.
    """
    with wrong_usage():
        topology = load_pipeline(app).check()
    clock, rng = SystemClock(), SystemRng()
    with store.to_write(read_only=dry_run, clock=clock, rng=rng) as opened:
        snapshot = opened.snapshot()
        names = set(computations) or {
            name for name, node in topology.computations.items() if node.computation.state_version
        }
        updates = sum(file.num_records or 0 for name in names for file in snapshot.files_in(name))
        seen = 0

        def on_piece(more: int) -> None:
            nonlocal seen
            seen += more
            on_progress(seen, updates)

        with progress_bar("upgrading row updates") as on_progress:
            done = upgrade_offline(
                opened, topology, clock, rng, computations=computations, dry_run=dry_run, on_progress=on_piece
            )
    upgraded = [{**asdict(one), "failures": dict(one.failures)} for one in done]
    rows = [(one.computation, one.state_version, one.rows, one.current, one.failed) for one in done]
    went = "would be upgraded" if dry_run else "upgraded"
    columns = ("computation", "state_version", went, "up to date", "failed")
    print_rows(upgraded, columns, rows, as_json=as_json)
    for one in () if as_json else done:
        for key, reason in one.failures:
            note(f"{one.computation} {key}: {reason}")
    if not (done or as_json):
        note("no computation of the pipeline declares a state_version")
    context.exit(1 if any(one.failed for one in done) else 0)


@command(
    "millpond verify pond",
    "millpond verify pond --json | jq .path",
    Example(
        "millpond verify s3://bucket/pond --zookeeper zk1:2181,zk2:2181", not_run="a bucket and an ensemble"
    ),
    exit_codes={0: "the store is sound", 1: "the store is damaged, or an error"},
)
@store_argument
@zookeeper_options
@json_option("One JSON object per finding, one per line.")
@click.pass_context
def verify(context: click.Context, store: StoreAt, *, as_json: bool) -> None:
    """Read all of STORE and report damage.

    The command checks every commit file (its seal, that it is built on the commit before it, that fences and
    positions follow the rules), every checkpoint, every live file (its seal and checksums, and that its rows
    match the log), and the high-water marks in the store's folder and, if ZooKeeper answers, there:
    they show whether the newest commits are missing. The report names each damaged file and its contents.

    Nothing is changed.
    """
    with store.to_read(check_mark=False) as opened:
        mark = _read_mark(opened, store)
        with progress_bar("reading files") as on_progress:
            verified = verify_store(opened.objects, mark, on_progress=on_progress)
    findings = [asdict(finding) for finding in verified.findings]
    if findings or as_json:
        print_rows(
            findings, ("file", "held", "fault"), [tuple(one.values()) for one in findings], as_json=as_json
        )
    if not as_json:
        say(
            f"{f'{len(findings)} damaged' if findings else 'sound'}: {verified.commits:,} commits, "
            f"{verified.checkpoints:,} checkpoints, {verified.files:,} files with {verified.rows:,} row updates"
        )
    context.exit(1 if findings else 0)


def _read_mark(opened: Store, place: StoreAt) -> Mark | None:
    """Return the later of the high-water marks in the store's folder and, where it answers, in ZooKeeper."""
    given = security_of(place.zookeeper, place.zookeeper_security)
    marks = list_marks(open_objects(opened.path, opened.storage_options))
    stored = newest_mark(marks, [known.id for known in opened.lineage.incarnations])
    hosts = place.zookeeper or local_server(opened.path)
    if hosts is None:
        if stored is None:
            note("the high-water mark is not checked: the store's ZooKeeper server is not running")
        return stored
    try:
        security = given if place.zookeeper else local_security(opened.path)
        return later_mark(stored, ask_for_mark(hosts, opened.lineage.current.id, SystemClock(), security))
    except (UnavailableError, InvalidError) as error:
        if place.zookeeper and isinstance(error, InvalidError):
            raise
        note(f"the high-water mark of ZooKeeper is not checked: {error.message}")
        return stored
