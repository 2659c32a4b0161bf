"""``millpond history``: the commits of a store, newest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.inputs import consumed_inputs
from millpond.cli.terminal.opening import StoreAt, store_argument
from millpond.cli.terminal.output import json_option, print_json, print_table, time_text
from millpond.statestore.catalog.entries import PipelineDefinition, fences_of, superstep_of
from millpond.statestore.catalog.rebuild import LoggedTopology, facts_of, logged_topologies
from millpond.statestore.catalog.topology import TopologyChange
from millpond.statestore.log.action import Action, Add, CommitInfo, Remove
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.types import TableVersion

_COMMITS: Final = 20
_WRITER_DIGITS: Final = 8
_CODE_DIGITS: Final = 8


@click.command(
    cls=TeachingCommand,
    examples=(
        "millpond history pond",
        "millpond history pond --limit 100",
        "millpond history pond --topology",
        "millpond history pond --json | jq 'select(.what == \"fence\")'",
    ),
)
@store_argument
@click.option(
    "--limit", type=click.IntRange(min=1), default=_COMMITS, show_default=True, metavar="N",
    help="Show at most the newest N commits.",
)  # fmt: skip
@click.option(
    "--topology", "of_topology", is_flag=True,
    help="Show which computations, sinks and code there were from which version on, oldest first.",
)  # fmt: skip
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
            _print_topologies(logged_topologies(opened.log, newest)[-limit:], as_json=as_json)
            return
        entries = list(_entries(opened.log, newest, limit))
    if as_json:
        print_json({**entry, "inputs": [*map(asdict, entry["inputs"])]} for entry in entries)
        return
    columns = ("version", "at", "what", "pipeline", "superstep", "records", "intervals", "+files", "-files")
    print_table("", (*columns, "consumed", "writer"), map(_row, entries))


def _row(entry: Mapping[str, Any]) -> tuple[object, ...]:
    *fields, inputs, writer = entry.values()
    consumed = ", ".join(f"{one.input}: {one.position}" for one in inputs)
    return (*fields, consumed, (writer or "")[:_WRITER_DIGITS])


def _offsets(metadata: Mapping[str, object]) -> dict[str, str]:
    offsets = metadata.get("source_offsets")
    return {app_id: str(at) for app_id, at in offsets.items()} if isinstance(offsets, Mapping) else {}


def _entries(log: Log, newest: TableVersion, limit: int) -> Iterator[dict[str, Any]]:
    for version in range(newest, max(newest - limit, -1), -1):
        data = log.read(TableVersion(version))
        if data is None:
            return
        yield _entry(TableVersion(version), decode(data, commit_path(version)))


def _entry(version: TableVersion, actions: tuple[Action, ...]) -> dict[str, Any]:
    """Return one commit with the fields that the command prints, in their order."""
    facts = facts_of(version, actions)
    superstep = superstep_of(facts)
    operation = next((action.operation for action in actions if isinstance(action, CommitInfo)), "unknown")
    return {
        "version": version,
        "at": time_text(facts.wall_us),
        "what": str(facts.metadata.get("kind", operation)),
        "pipeline": None if superstep is None else superstep.pipeline,
        "superstep": None if superstep is None else superstep.superstep,
        "records": None if superstep is None else superstep.records,
        "intervals": sum(1 for _ in fences_of(facts.txns)),
        "files_added": sum(isinstance(action, Add) for action in actions),
        "files_removed": sum(isinstance(action, Remove) for action in actions),
        "inputs": consumed_inputs(facts.txns, _offsets(facts.metadata)),
        "writer": str(facts.metadata["writer"]) if "writer" in facts.metadata else None,
    }


def _print_topologies(topologies: Iterable[LoggedTopology], *, as_json: bool) -> None:
    if as_json:
        print_json(_topology(one) for one in topologies)
    else:
        columns = ("version", "at", "pipeline", "by", "computations", "sinks", "changes")
        print_table("", columns, map(_topology_row, topologies))


def _topology_row(one: LoggedTopology) -> tuple[object, ...]:
    definition = one.definition
    return (
        one.version,
        time_text(one.wall_us),
        definition.name,
        "update" if one.is_update else "start",
        "\n".join(f"{node.name} {node.code_hash[:_CODE_DIGITS]}" for node in definition.computations),
        "\n".join(f"{sink.name} -> {sink.destination}" for sink in definition.sinks),
        "the log does not reach back" if one.change is None else "\n".join(_changes(one.change)),
    )


def _topology(one: LoggedTopology) -> dict[str, object]:
    return {
        "version": one.version,
        "at": time_text(one.wall_us),
        "pipeline": one.definition.name,
        "by": "update" if one.is_update else "start",
        "computations": _computations(one.definition),
        "sinks": [asdict(sink) for sink in one.definition.sinks],
        "change": None if one.change is None else asdict(one.change),
    }


def _computations(definition: PipelineDefinition) -> list[dict[str, object]]:
    return [
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
