"""Topologies by version, as a table for people or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Final

from millpond.statestore.catalog.entries import PipelineDefinition
from millpond.statestore.catalog.topology_change import TopologyChange
from millpond.statestore.catalog.topology_log import LoggedTopology
from millpond.tools.terminal.output import print_json, print_table, time_text

_CODE_DIGITS: Final = 8
_COLUMNS: Final = ("version", "at", "pipeline", "by", "computations", "sinks", "changes")
_UNKNOWN: Final = "the log does not reach back"


def print_topologies(topologies: Iterable[LoggedTopology], *, as_json: bool) -> None:
    """Print topologies, oldest first.

    Args:
        topologies: what the log tells.
        as_json: one JSON object per line, with whole fingerprints, options and connections.
    """
    if as_json:
        print_json(_json(one) for one in topologies)
    else:
        print_table("", _COLUMNS, (_row(one) for one in topologies))


def _row(one: LoggedTopology) -> tuple[object, ...]:
    definition = one.definition
    return (
        one.version,
        time_text(one.wall_us),
        definition.name,
        _by(one),
        "\n".join(f"{node.name} {node.code_hash[:_CODE_DIGITS]}" for node in definition.computations),
        "\n".join(f"{sink.name} -> {sink.destination}" for sink in definition.sinks),
        _UNKNOWN if one.change is None else "\n".join(_changes(one.change)),
    )


def _json(one: LoggedTopology) -> dict[str, object]:
    return {
        "version": one.version,
        "at": time_text(one.wall_us),
        "pipeline": one.definition.name,
        "by": _by(one),
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


def _by(one: LoggedTopology) -> str:
    return "update" if one.is_update else "start"
