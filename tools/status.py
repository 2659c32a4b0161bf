"""
``millpond status``: what a store holds and how far its pipelines are.

All of it but the code versions comes from the log, so it is right also when the catalog
is behind, away or lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import click

from millpond.statestore.catalog.facts import SAVEPOINT_RELEASED, fences_of, savepoints_of
from millpond.statestore.catalog.overlap import superseded
from millpond.statestore.catalog.rebuild import logged_commits
from millpond.statestore.errors import MillpondError
from millpond.statestore.interval import Interval
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.store import Store
from millpond.tools.cli_help import TeachingCommand
from millpond.tools.opening import open_to_read, store_argument
from millpond.tools.output import note, print_json, print_table, size_text, time_text

__all__ = ["status"]

_TOTALS: Final = ("records", "late", "dropped", "duplicates", "timers", "productions", "dead_letters")


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond status pond",
        "millpond status pond --json | jq .computations",
        "millpond status s3://bucket/pond --storage-option aws_region=eu-central-1",
    ),
)
@store_argument
@click.option("--catalog", metavar="URL", help="SQLAlchemy URL of the catalog, unless in the store's folder.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything.")
def status(store: str, storage_options: tuple[str, ...], catalog: str | None, *, as_json: bool) -> None:
    """
    Show what STORE holds and how far its pipelines are.

    For each pipeline: its last superstep, its running totals, and its inputs' last batches. For each
    computation: how many key intervals share its work, its files, how many row updates they hold (a key
    has as many as supersteps touched it, until a compaction joins them), its low watermark: no
    record older than that is expected any more; and how many records were late, were dropped for
    it, and whatever else its code counts. Where the catalog answers, also the code versions.
    """
    with open_to_read(store, storage_options, catalog) as opened:
        found = _describe(opened)
    if as_json:
        print_json([found])
    else:
        _print(found)


def _describe(store: Store) -> dict[str, Any]:
    snapshot = store.snapshot()
    newest = next(logged_commits(store.log, snapshot.version, 1), None)
    return {
        "store": store.path,
        "store_id": store.store_id,
        "version": snapshot.version,
        "committed_at": None if newest is None else time_text(newest.wall_us),
        "files": snapshot.file_count,
        "size_bytes": sum(file.size_bytes for file in snapshot.files),
        "pipelines": _pipelines(snapshot),
        "computations": _computations(snapshot, _code_versions(store)),
        "savepoints": [
            {"name": name, "version": version}
            for name, version in savepoints_of(snapshot.txns)
            if version != SAVEPOINT_RELEASED
        ],
    }


def _pipelines(snapshot: Snapshot) -> list[dict[str, Any]]:
    found: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: {"superstep": 0, "totals": {}, "inputs": []}
    )
    for app_id, version in snapshot.txns.items():
        match [unquote(part) for part in app_id.split("/")]:
            case ["millpond", "superstep", pipeline]:
                found[pipeline]["superstep"] = version
            case ["millpond", "total", pipeline, counter]:
                found[pipeline]["totals"][counter] = version
            case ["millpond", "input", pipeline, name, source]:
                found[pipeline]["inputs"].append({"input": name, "source": source, "batch": version})
            case _:
                pass
    return [{"pipeline": pipeline, **found[pipeline]} for pipeline in sorted(found)]


def _computations(snapshot: Snapshot, code_versions: Mapping[str, int]) -> list[dict[str, Any]]:
    intervals = _live_intervals(snapshot)
    counts = _counts(snapshot)
    return [
        {
            "computation": name,
            "code_version": code_versions.get(name),
            "intervals": len(intervals.get(name, ())),
            "files": len(files := snapshot.files_in(name)),
            "row_updates": sum(file.num_records or 0 for file in files),
            "size_bytes": sum(file.size_bytes for file in files),
            "watermark": time_text(_watermark(snapshot, name, intervals.get(name, ()))),
            "counts": counts.get(name, {}),
        }
        for name in sorted({*snapshot.computations, *intervals})
    ]


def _counts(snapshot: Snapshot) -> dict[str, dict[str, int]]:
    found: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for app_id, value in snapshot.txns.items():
        match [unquote(part) for part in app_id.split("/")]:
            case ["millpond", "count", _, computation, counter]:
                found[computation][counter] = value
            case _:
                pass
    return found


def _live_intervals(snapshot: Snapshot) -> dict[str, list[Interval]]:
    sequencers = {interval: fence.sequencer for interval, fence in fences_of(snapshot.txns)}
    live: defaultdict[str, list[Interval]] = defaultdict(list)
    for interval in sequencers.keys() - superseded(sequencers).keys():
        live[interval.computation].append(interval)
    return live


def _watermark(snapshot: Snapshot, computation: str, intervals: Iterable[Interval]) -> int | None:
    for app_id, at_us in snapshot.txns.items():
        match [unquote(part) for part in app_id.split("/")]:
            case ["millpond", "watermark", _, "computation", name] if name == computation:
                return at_us
            case _:
                pass
    marks = (snapshot.watermarks.get(interval.app_id) for interval in intervals)
    return min((mark for mark in marks if mark is not None), default=None)


def _code_versions(store: Store) -> dict[str, int]:
    try:
        catalog = store.catalog
        return {} if catalog is None else {each.name: each.code_version for each in catalog.computations()}
    except MillpondError as error:
        note(f"no code versions: {error}")
        return {}


def _print(found: Mapping[str, Any]) -> None:
    click.echo(f"store     {found['store']} ({found['store_id']})")
    click.echo(
        f"version   {found['version']}, committed {found['committed_at'] or 'before what is left of the log'}"
    )
    click.echo(f"rows      {found['files']:,} files, {size_text(found['size_bytes'])}")
    if found["pipelines"]:
        rows = [
            (each["pipeline"], each["superstep"], *(each["totals"].get(name) for name in _TOTALS))
            for each in found["pipelines"]
        ]
        print_table(
            "Pipelines", ("pipeline", "superstep", *(name.replace("_", " ") for name in _TOTALS)), rows
        )
    inputs = [
        (each["pipeline"], one["input"], one["source"], one["batch"])
        for each in found["pipelines"]
        for one in each["inputs"]
    ]
    if inputs:
        print_table("Inputs", ("pipeline", "input", "source", "last batch"), inputs)
    if found["computations"]:
        _print_computations(found["computations"])
    if found["savepoints"]:
        rows = [(each["name"], each["version"]) for each in found["savepoints"]]
        print_table("Savepoints", ("savepoint", "version"), rows)


def _print_computations(computations: Sequence[Mapping[str, Any]]) -> None:
    columns = ("computation", "code version", "intervals", "files", "row updates", "size", "low watermark")
    rows = [
        (
            each["computation"],
            each["code_version"],
            each["intervals"],
            each["files"],
            each["row_updates"],
            size_text(each["size_bytes"]),
            each["watermark"],
        )
        for each in computations
    ]
    print_table("Computations", columns, rows)
    counted = [
        (each["computation"], counter, f"{value:,}")
        for each in computations
        for counter, value in sorted(each["counts"].items())
    ]
    if counted:
        print_table("Counters", ("computation", "counter", "count"), counted)
