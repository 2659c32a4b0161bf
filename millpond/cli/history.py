"""``millpond history``: the commits of a store, newest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from typing import Final

import click

from millpond.cli.terminal.apps import print_topologies
from millpond.cli.terminal.cli_help import TeachingCommand
from millpond.cli.terminal.inputs import ConsumedInput, consumed_inputs
from millpond.cli.terminal.opening import open_to_read, store_argument
from millpond.cli.terminal.output import json_option, print_json, print_table, time_text
from millpond.statestore.catalog.entries import fences_of, superstep_of
from millpond.statestore.catalog.rebuild import facts_of, logged_topologies
from millpond.statestore.log.action import Action, Add, CommitInfo, Remove
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.types import TableVersion

_COMMITS: Final = 20
_WRITER_DIGITS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One commit, as the command prints it."""

    version: int
    at: str | None
    what: str
    pipeline: str | None
    superstep: int | None
    records: int | None
    intervals: int
    files_added: int
    files_removed: int
    inputs: tuple[ConsumedInput, ...]
    writer: str | None


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
def history(
    store: str, storage_options: tuple[str, ...], limit: int, *, of_topology: bool, as_json: bool
) -> None:
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
    fingerprint, and what is new (+), gone (-) or different (~). It reads all commits that are left; --limit
    then counts such versions.
    """
    with open_to_read(store, storage_options) as opened:
        newest = opened.snapshot().version
        if of_topology:
            print_topologies(logged_topologies(opened.log, newest)[-limit:], as_json=as_json)
            return
        entries = list(_entries(opened.log, newest, limit))
    if as_json:
        print_json(map(asdict, entries))
        return
    columns = ("version", "at", "what", "pipeline", "superstep", "records", "intervals", "+files", "-files")
    print_table("", (*columns, "consumed", "writer"), map(_row, entries))


def _row(entry: _Entry) -> tuple[object, ...]:
    *fields, inputs, writer = (getattr(entry, field.name) for field in dataclass_fields(entry))
    consumed = ", ".join(f"{one.input}: {one.position}" for one in inputs)
    return (*fields, consumed, (writer or "")[:_WRITER_DIGITS])


def _offsets(metadata: Mapping[str, object]) -> dict[str, str]:
    told = metadata.get("source_offsets")
    return {app_id: str(at) for app_id, at in told.items()} if isinstance(told, Mapping) else {}


def _entries(log: Log, newest: TableVersion, limit: int) -> Iterator[_Entry]:
    for version in range(newest, max(newest - limit, -1), -1):
        data = log.read(TableVersion(version))
        if data is None:
            return
        yield _entry(TableVersion(version), decode(data, commit_path(version)))


def _entry(version: TableVersion, actions: tuple[Action, ...]) -> _Entry:
    facts = facts_of(version, actions)
    superstep = superstep_of(facts)
    operation = next((action.operation for action in actions if isinstance(action, CommitInfo)), "unknown")
    return _Entry(
        version=version,
        at=time_text(facts.wall_us),
        what=str(facts.metadata.get("kind", operation)),
        pipeline=None if superstep is None else superstep.pipeline,
        superstep=None if superstep is None else superstep.superstep,
        records=None if superstep is None else superstep.records,
        intervals=sum(1 for _ in fences_of(facts.txns)),
        files_added=sum(isinstance(action, Add) for action in actions),
        files_removed=sum(isinstance(action, Remove) for action in actions),
        inputs=tuple(consumed_inputs(facts.txns, _offsets(facts.metadata))),
        writer=str(facts.metadata["writer"]) if "writer" in facts.metadata else None,
    )
