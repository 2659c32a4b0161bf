"""What the shell completes: folders as stores, and the names of computations and savepoints out of a store on this machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from millpond.statestore.errors import MillpondError
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.versions.savepoint import open_savepoints


def complete_store(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The folders that a store may lie in: the shell lists them itself."""
    del context, param
    return [CompletionItem(incomplete, type="dir")]


def complete_computation(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The computations of which the store has rows."""
    del param
    snapshot = _snapshot(context)
    return [] if snapshot is None else _beginning(snapshot.computations, incomplete)


def complete_savepoint(
    context: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The savepoints of the store."""
    del param
    snapshot = _snapshot(context)
    names = () if snapshot is None else [savepoint.name for savepoint in open_savepoints(snapshot.txns)]
    return _beginning(names, incomplete)


def _snapshot(context: click.Context) -> Snapshot | None:
    """The newest version of the store that is named on the line; ``None`` where it is not on this machine, or not sound."""
    # Where the last option lacks its value yet, click leaves all arguments as they are.
    store = context.params.get("store") or next(iter(context.args), None)
    if not isinstance(store, str) or "://" in store or not Path(store, "rows", "_delta_log").is_dir():
        return None
    try:
        return load(Log(open_objects(f"{Path(store).resolve()}/rows")))
    except MillpondError:
        return None


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]
