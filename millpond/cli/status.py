"""``millpond status``: a store's contents and its pipelines' progress.

Everything except the code versions comes from the log, so it is right even when the catalog is behind or lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.inputs import ConsumedInput, consumed_inputs
from millpond.cli.terminal.opening import StoreAt, store_argument, zookeeper_options
from millpond.cli.terminal.options import catalog_option, flag, json_option
from millpond.cli.terminal.output import note, print_json, print_table, say, size_text, time_text
from millpond.executor.inputs.positions import current_name
from millpond.executor.pipeline.nodes import DEAD_LETTERS, control_interval
from millpond.statestore.app_ids import AppId, pipeline_number, supersteps_of
from millpond.statestore.catalog.topology import DEFINES, definition_from_metadata
from millpond.statestore.errors import DataError, InvalidError, MillpondError, UnavailableError
from millpond.statestore.history.replayed_log import newest_commits, read_commit
from millpond.statestore.history.savepoint import open_savepoints
from millpond.statestore.interval import Interval
from millpond.statestore.leases.ensemble import recorded_ensemble
from millpond.statestore.leases.zookeeper_client import security_of
from millpond.statestore.leases.zookeeper_high_water import local_server
from millpond.statestore.leases.zookeeper_lease import ask_who_waits
from millpond.statestore.leases.zookeeper_server import local_security
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock
from millpond.statestore.view import connect

_COMMITS_MAX: Final = 1_000
_PROCESS: Final = ("pipeline", "process", "state")
_TOTALS: Final = ("records", "late", "dropped", "duplicates", "timers", "productions", "dead_letters")


@command(
    "millpond status pond",
    "millpond status pond --json | jq .computations",
    Example("millpond status s3://bucket/pond --storage-option aws_region=eu-central-1", not_run="a bucket"),
    exit_codes={1: "an error; with --check also: there are dead letters"},
)
@store_argument
@zookeeper_options
@catalog_option
@flag("--check", "Exit with 1 if there are dead letters.")
@json_option("One JSON object with everything.")
def status(store: StoreAt, catalog: str | None, *, check: bool, as_json: bool) -> None:
    """Show the contents of STORE and the progress of its pipelines.

    For each pipeline: its last superstep, its running totals, and how far its inputs are consumed: batches of Spark, or
    rows, and where that is in the source, such as the row of a file. For each computation: its number of key intervals, its files, the number of row updates in them (a key has
    one per superstep that touched it, until a compaction joins them), its low watermark (no older
    record is expected), and its counters: late records, dropped records, dead letters, and counters of
    your code. For dead letters also the error of the newest one. If the catalog is available, also
    the code versions.

    If the store's ensemble or its own server answers, the processes that run its pipelines are shown, and those that
    stand by. If the ensemble does not answer, the pipelines wait for it.
    """
    with store.to_read(catalog) as opened:
        description = _describe(opened, store)
    if as_json:
        print_json([description])
    else:
        committed_at = description["committed_at"] or "before the start of the remaining log"
        say(f"store     {description['store']} ({description['store_id']})")
        say(f"version   {description['version']}, committed {committed_at}")
        if description["ensemble"]:
            say(f"ensemble  {description['ensemble']}")
        say(f"rows      {description['files']:,} files, {size_text(description['size_bytes'])}")
        for title, columns, rows in _tables(description):
            if rows:
                print_table(title, columns, rows)
    if check and description["dead_letters"]:
        raise SystemExit(1)


def _describe(store: Store, place: StoreAt) -> dict[str, Any]:
    snapshot = store.opened or store.snapshot()
    newest = read_commit(store.log, snapshot.version)
    return {
        "store": store.path,
        "store_id": store.store_id,
        "version": snapshot.version,
        "committed_at": None if newest is None else time_text(newest.wall_us),
        "files": snapshot.file_count,
        "size_bytes": sum(file.size_bytes for file in snapshot.files),
        "pipelines": _pipelines(snapshot),
        "computations": _computations(snapshot, _code_versions(store), _departed(store, snapshot)),
        "dead_letters": _dead_letters(store, snapshot),
        "savepoints": [*map(asdict, open_savepoints(snapshot.txns))],
        **_service(store, place, snapshot.txns),
    }


def _service(store: Store, place: StoreAt, txns: Mapping[str, int]) -> dict[str, Any]:
    """Describe who serves the store's leases, and the processes that hold them or stand by."""
    recorded = recorded_ensemble(txns).hosts
    own = None if recorded else local_server(store.path)
    hosts = own or place.zookeeper or recorded
    names = {control_interval(stored): current_name(txns, stored) for stored in supersteps_of(txns)}
    found: dict[str, Any] = {"ensemble": recorded or None, "answers": None, "processes": []}
    # An ensemble in the environment says nothing of a store whose log names none.
    if not hosts or not (own or recorded):
        return found
    try:
        security = local_security(store.path) if own else security_of(hosts, place.zookeeper_security)
        incarnation = store.lineage.current.id
        attendance = ask_who_waits(hosts, incarnation, tuple(names), SystemClock(), security)
    except (UnavailableError, InvalidError) as error:
        note(f"the pipelines wait for the store's zookeeper, or are stopped: {error}")
        return found | {"answers": False}
    processes = [(names[one], str(holder), "runs") for one, holder in attendance.holders.items()]
    processes += [(names.get(one, one.app_id), str(holder), "waits") for one, holder in attendance.waiting]
    rows = [dict(zip(_PROCESS, row, strict=True)) for row in sorted(processes)]
    return found | {"answers": True, "processes": rows}


def _positions(snapshot: Snapshot, kind: AppId) -> Iterator[tuple[tuple[str, ...], int]]:
    for app_id, value in snapshot.txns.items():
        if app_id.startswith(kind):
            yield kind.parts(app_id), value


def _pipelines(snapshot: Snapshot) -> list[dict[str, Any]]:
    pipelines: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: {"superstep": 0, "totals": {}, "inputs": []}
    )
    for pipeline, superstep in supersteps_of(snapshot.txns).items():
        pipelines[pipeline]["superstep"] = superstep
    for (pipeline, counter), total in _positions(snapshot, AppId.TOTAL):
        pipelines[pipeline]["totals"][counter] = total
    for consumed in consumed_inputs(snapshot.txns, snapshot.source_offsets):
        fields = asdict(consumed)
        pipelines[fields.pop("pipeline")]["inputs"].append(fields)
    names = {current_name(snapshot.txns, pipeline): pipeline for pipeline in pipelines}
    return [{"pipeline": name, **pipelines[names[name]]} for name in sorted(names)]


def _departed(store: Store, snapshot: Snapshot) -> set[str]:
    """Return the computations that were renamed or dropped: their fences and counts stay in the table.

    As far as the newest commits still say which computations their pipeline has.
    """
    empty = {one.computation for one in snapshot.live_intervals()} - {*snapshot.computations, DEAD_LETTERS}
    declared: dict[int, set[str]] = {}
    for commit in newest_commits(store.log, snapshot.version, _COMMITS_MAX, naming=DEFINES) if empty else ():
        definition = definition_from_metadata(commit.metadata)
        if definition is not None:
            names = {one.name for one in definition.computations}
            declared.setdefault(pipeline_number(definition.name), names)
    owners = {name: snapshot.txns.get(AppId.CLAIM.of(name), -1) for name in empty}
    return {name for name, owner in owners.items() if name not in declared.get(owner, empty)}


def _computations(
    snapshot: Snapshot, code_versions: Mapping[str, int], departed: set[str]
) -> list[dict[str, Any]]:
    intervals: defaultdict[str, list[Interval]] = defaultdict(list)
    for interval in snapshot.live_intervals():
        intervals[interval.computation].append(interval)
    counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (_, computation, counter), value in _positions(snapshot, AppId.COUNT):
        counts[computation][counter] = value
    return [
        {
            "computation": name,
            "code_version": code_versions.get(name),
            "intervals": len(intervals[name]),
            "files": len(files := snapshot.files_in(name)),
            "row_updates": sum(file.num_records or 0 for file in files),
            "size_bytes": sum(file.size_bytes for file in files),
            "watermark": time_text(_watermark(snapshot, name, intervals[name])),
            "counts": counts[name],
        }
        for name in sorted({*snapshot.computations, *intervals} - departed)
    ]


def _watermark(snapshot: Snapshot, computation: str, intervals: Iterable[Interval]) -> int | None:
    for parts, at_us in _positions(snapshot, AppId.WATERMARK):
        if parts[1:] == ("computation", computation):
            return at_us
    watermarks = (snapshot.watermarks.get(interval.app_id) for interval in intervals)
    return min((watermark for watermark in watermarks if watermark is not None), default=None)


def _dead_letters(store: Store, snapshot: Snapshot) -> list[dict[str, Any]]:
    """Count the dead letters by computation, with the newest error of each."""
    if not snapshot.files_in(DEAD_LETTERS):
        return []
    # Only now, because it takes as long as the rest of the command.
    import duckdb

    newest = """
        select state ->> 'computation' as computation, count(*) as letters,
            arg_max(state ->> 'error', superstep) as newest_error,
            arg_max(state ->> 'failed_at', superstep) as failed_at
        from dead_letters group by all order by all
    """
    try:
        found: list[dict[str, Any]] = (
            connect(snapshot, store.objects).sql(newest).to_arrow_table().to_pylist()
        )
    except duckdb.Error as error:
        raise DataError("the dead letters cannot be read", cause=error) from error
    return found


def _code_versions(store: Store) -> dict[str, int]:
    try:
        catalog = store.catalog
        entries = () if catalog is None else catalog.computations()
        return {entry.name: entry.code_version for entry in entries}
    except MillpondError as error:
        note(f"no code versions: {error}")
        return {}


def _tables(
    description: Mapping[str, Any],
) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[object]]]]:
    pipelines, computations = description["pipelines"], description["computations"]
    totals = [name.replace("_", " ") for name in _TOTALS[:-1]]
    yield "Processes", _PROCESS, [tuple(one.values()) for one in description["processes"]]
    rows = [(one["pipeline"], one["superstep"], *map(one["totals"].get, _TOTALS)) for one in pipelines]
    yield "Pipelines", ("pipeline", "superstep", *totals, "dead letters ever"), rows
    inputs = [
        ConsumedInput(pipeline=one["pipeline"], **source) for one in pipelines for source in one["inputs"]
    ]
    rows = [(one.pipeline, one.input, one.source, one.position, one.place) for one in inputs]
    yield "Inputs", ("pipeline", "input", "source", "consumed", "up to"), rows
    columns = ("computation", "code version", "intervals", "files", "row updates", "size", "low watermark")
    cells = [{**one, "size_bytes": size_text(one["size_bytes"])} for one in computations]
    yield "Computations", columns, [tuple(one.values())[:-1] for one in cells]
    counted = [
        (one["computation"], counter, f"{value:,}")
        for one in computations
        for counter, value in sorted(one["counts"].items())
    ]
    yield "Counters", ("computation", "counter", "count"), counted
    letters = [tuple(one.values()) for one in description["dead_letters"]]
    yield "Dead letters", ("computation", "dead letters", "newest error", "failed at"), letters
    savepoints = [tuple(one.values()) for one in description["savepoints"]]
    yield "Savepoints", ("savepoint", "version"), savepoints
