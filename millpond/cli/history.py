"""``millpond history``: the commits of a store, newest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.inputs import consumed_inputs
from millpond.cli.terminal.opening import StoreAt, store_argument
from millpond.cli.terminal.options import flag, json_option, number
from millpond.cli.terminal.output import print_rows, time_text
from millpond.statestore.app_ids import supersteps_of
from millpond.statestore.catalog.topology import (
    LoggedTopology,
    TopologyChange,
    logged_topologies,
)
from millpond.statestore.history.replayed_log import LoggedCommit, newest_commits
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add, Remove

_COMMITS: Final = 20
_WRITER_DIGITS: Final = 8
_CODE_DIGITS: Final = 8
_TOPOLOGY_COLUMNS: Final = ("version", "at", "pipeline", "by", "computations", "sinks", "changes")


@command(
    "millpond history pond",
    "millpond history pond --limit 100",
    "millpond history pond --topology",
    "millpond history pond --json | jq 'select(.what == \"fence\")'",
)
@store_argument
@number("--limit", "Show at most the newest N commits.", _COMMITS)
@flag(
    "--topology of_topology",
    "Show which computations, sinks and code there were from which version on, oldest first.",
)
@json_option("One JSON object per line.")
def history(store: StoreAt, limit: int, *, of_topology: bool, as_json: bool) -> None:
    """Show the commits of STORE, newest first.

    Every commit makes one table version, and every version can be read: pass its number to `millpond
    rows` or `millpond sql` as --version. A commit is one of: create (the store was created),
    fence (a writer took over intervals: later writes of the former owner are refused),
    superstep (a round of the pipeline: state, timers, productions and input positions together,
    which are shown as far as the commit moved them), topology (a running pipeline was changed),
    compaction or other maintenance, or an operation of another Delta engine.
    Old commits are cleaned up over time, so the history may not reach back to the first version.

    With --topology it shows each version in which a pipeline was started with other computations, sinks or
    code than before, or was changed while it ran: of each computation the code, as the first digits of a
    fingerprint, and the changes: new (+), gone (-) or different (~). It reads all commits that are left; --limit
    then counts such versions.
    """
    with store.to_read() as opened:
        newest = opened.snapshot().version
        if of_topology:
            topologies = logged_topologies(opened.log, newest)[-limit:]
            print_rows(
                map(_topology, topologies), _TOPOLOGY_COLUMNS, map(_topology_row, topologies), as_json=as_json
            )
            return
        entries = [_entry(commit) for commit in newest_commits(opened.log, newest, limit)]
    columns = ("version", "at", "what", "pipeline", "superstep", "records", "intervals", "+files", "-files")
    shown = (entry | {"inputs": [*map(asdict, entry["inputs"])]} for entry in entries)
    print_rows(shown, (*columns, "consumed", "writer"), map(_row, entries), as_json=as_json)


def _row(entry: Mapping[str, Any]) -> tuple[object, ...]:
    *fields, inputs, writer = entry.values()
    consumed = ", ".join(f"{one.input}: {one.position}" for one in inputs)
    return (*fields, consumed, (writer or "")[:_WRITER_DIGITS])


def _entry(commit: LoggedCommit) -> dict[str, Any]:
    """Return one commit with the fields that the command prints, in their order."""
    pipeline, superstep = next(iter(supersteps_of(commit.txns).items()), (None, None))
    metadata = commit.metadata
    operation = "unknown" if commit.info is None else commit.info.operation
    told, counts, records = (metadata.get(name) for name in ("source_offsets", "counts", "records"))
    offsets = {app_id: str(at) for app_id, at in told.items()} if isinstance(told, Mapping) else {}
    if records is None and isinstance(counts, Mapping):
        records = counts.get("records")
    records = records if isinstance(records, int) else 0
    return {
        "version": commit.version,
        "at": time_text(commit.wall_us),
        "what": str(metadata.get("kind", operation)),
        "pipeline": pipeline,
        "superstep": superstep,
        "records": None if superstep is None else records,
        "intervals": sum(Interval.from_app_id(app_id) is not None for app_id in commit.txns),
        "files_added": sum(isinstance(action, Add) for action in commit.actions),
        "files_removed": sum(isinstance(action, Remove) for action in commit.actions),
        "inputs": consumed_inputs(commit.txns, offsets),
        "writer": str(metadata["writer"]) if "writer" in metadata else None,
    }


def _topology_row(one: LoggedTopology) -> tuple[object, ...]:
    definition = one.definition
    return (
        one.version,
        time_text(one.wall_us),
        definition.name,
        "update" if one.is_update else "start",
        [f"{node.name} {node.code_hash[:_CODE_DIGITS]}" for node in definition.computations],
        [f"{sink.name} -> {sink.destination}" for sink in definition.sinks],
        "the log does not reach back" if one.change is None else list(_changes(one.change)),
    )


def _topology(one: LoggedTopology) -> dict[str, object]:
    definition = one.definition
    computations = [
        {
            "name": node.name,
            "code": node.code_hash,
            "codec": node.codec,
            "options": dict(node.options),
            "subscribes": {
                s.stream: s.key_extractor for s in definition.subscriptions if s.consumer == node.name
            },
            "produces": [stream.name for stream in definition.streams if node.name in stream.producers],
        }
        for node in definition.computations
    ]
    return {
        "version": one.version,
        "at": time_text(one.wall_us),
        "pipeline": definition.name,
        "by": "update" if one.is_update else "start",
        "computations": computations,
        "sinks": [asdict(sink) for sink in definition.sinks],
        "change": None if one.change is None else asdict(one.change),
    }


def _changes(change: TopologyChange) -> Iterator[str]:
    for mark, names, sinks in (
        ("+", change.added, change.sinks_added),
        ("-", change.removed, change.sinks_removed),
        ("~", change.changed, change.sinks_changed),
    ):
        yield from (f"{mark}{name}" for name in names)
        yield from (f"{mark}{name} (sink)" for name in sinks)
    if not change:
        yield "streams only"
