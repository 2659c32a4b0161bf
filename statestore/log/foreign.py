"""Commits of other engines on a store's rows: what moves data is refused, what only tidies up is welcome.

State, record ids, timers and input positions of a store change together. Another engine's RESTORE, DELETE,
UPDATE, MERGE or WRITE changes the rows and leaves the positions, so that what was consumed never comes
again, or counts twice. Delta says which commits those are: their file actions carry ``dataChange``, and
RESTORE is one by its name. Compactions (``dataChange`` is false), vacuums and checkpoints change nothing
that a reader sees. A store's tables are known by their configuration, so the tables of sinks, to which
others may write, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from millpond.statestore.errors import DataError
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Remove, Txn
from millpond.statestore.log.log import commit_path

_OWN_CONFIGURATION: Final = "millpond."
_OWN_TXN: Final = "millpond/"
_RESTORE: Final = "RESTORE"
_WAY_OUT: Final = (
    "another engine changed the store's rows, and input positions did not change with them: `millpond repair` "
    "takes the store back to the version before"
)


def foreign_change(actions: Iterable[Action], configuration: Mapping[str, str]) -> CommitInfo | None:
    """What another engine's commit says of itself if it changes what a store's rows mean; ``None`` otherwise.

    Args:
        actions: the commit's.
        configuration: the table's, before the commit; that of a table that is no store accepts everything.
    """
    own = {name: value for name, value in configuration.items() if name.startswith(_OWN_CONFIGURATION)}
    if not own:
        return None
    commit = tuple(actions)
    info = next((action for action in commit if isinstance(action, CommitInfo)), None)
    if info is not None and info.millpond is not None:
        return None
    operation = "" if info is None else info.operation
    if any(_changes(action, operation, own) for action in commit):
        return info or CommitInfo(operation="", timestamp_ms=0, engine_info="")
    return None


def refuse_foreign_change(
    version: int, actions: Iterable[Action], configuration: Mapping[str, str], *, store: str = ""
) -> None:
    """Refuse another engine's commit that changes what a store's rows mean; see `foreign_change`.

    Raises:
        DataError: it is one; the error names version, operation and engine.
    """
    info = foreign_change(actions, configuration)
    if info is not None:
        raise DataError(
            _WAY_OUT,
            version=version,
            operation=info.operation or "unknown",
            engine=info.engine_info or "unknown",
            path=commit_path(version),
            **({"store": store} if store else {}),
        )


def _changes(action: Action, operation: str, own: Mapping[str, str]) -> bool:
    match action:
        case Add() | Remove():
            # A restore is one, whatever it says of its files.
            return action.data_change or operation == _RESTORE
        case Txn():
            return action.app_id.startswith(_OWN_TXN)
        case Metadata():
            return any(action.configuration.get(name) != value for name, value in own.items())
        case _:
            return False
