"""
The catalog from the log: what is left of the commits, and the snapshot for what is not.

Old commit files are cleaned up, but the newest ``txn`` of every app id stays in the
snapshot. So one made-up commit stands for all that are gone, and then the commits that
are left are written down in the way in which they would have been when they were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from sqlalchemy import Connection

from millpond.statestore.catalog.commits import prune_journals, write_commits
from millpond.statestore.catalog.entries import CatalogLimits
from millpond.statestore.catalog.facts import KNOWN_BEFORE_LOG, CommitFacts
from millpond.statestore.catalog.tables import (
    INPUT_POSITIONS,
    INTERVALS,
    LEASES,
    SUPERSTEPS,
    WATERMARKS,
)
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.types import TableVersion, WallTimeMicros

__all__ = ["LogState", "facts_of", "logged_commits", "rewrite_commits"]

_COMMITS_PER_BATCH: Final = 256


class LogState(Protocol):
    """
    What `Catalog.rebuild` needs of a snapshot of the log.
    """

    @property
    def version(self) -> TableVersion:
        """
        The newest table version.
        """
        ...

    @property
    def txns(self) -> Mapping[str, int]:
        """
        The newest ``txn`` version of every app id.
        """
        ...


def facts_of(version: TableVersion, actions: Iterable[Action]) -> CommitFacts:
    """
    What a commit file says to the catalog; commits of others say nothing but their time.
    """
    txns: dict[str, int] = {}
    wall_us, metadata = 0, dict[str, object]()
    for action in actions:
        if isinstance(action, Txn):
            txns[action.app_id] = action.version
        elif isinstance(action, CommitInfo):
            wall_us = action.timestamp_ms * 1_000
            metadata = dict(action.millpond or {})
    return CommitFacts(version=version, wall_us=WallTimeMicros(wall_us), txns=txns, metadata=metadata)


def logged_commits(log: Log, newest: TableVersion, limit: int) -> Iterator[CommitFacts]:
    """
    The facts of the commits whose files are left, newest first, at most ``limit`` of them.

    Raises:
        DataError: a commit file is damaged.
    """
    for version in range(newest, max(newest - limit, -1), -1):
        data = log.read(TableVersion(version))
        if data is None:
            return
        yield facts_of(TableVersion(version), decode(data, commit_path(version)))


def rewrite_commits(
    connection: Connection, snapshot: LogState, commits: Iterable[CommitFacts], limits: CatalogLimits
) -> None:
    """
    Write anew what the log knows: `Catalog.rebuild` within a transaction.
    """
    known = sorted(
        (facts for facts in commits if facts.version <= snapshot.version),
        key=lambda facts: facts.version,
    )
    _forget_commits(connection, snapshot.version)
    write_commits(connection, (_before(snapshot, known),), limits)
    for start in range(0, len(known), _COMMITS_PER_BATCH):
        write_commits(connection, known[start : start + _COMMITS_PER_BATCH], limits)
    prune_journals(connection, limits)


def _forget_commits(connection: Connection, version: TableVersion) -> None:
    for table in (INTERVALS, LEASES, INPUT_POSITIONS):
        connection.execute(table.delete())
    for journal in (SUPERSTEPS, WATERMARKS):
        connection.execute(journal.delete().where(journal.c.version > version))


def _before(snapshot: LogState, known: Sequence[CommitFacts]) -> CommitFacts:
    """
    One commit that stands for all those whose files are gone: it says what no later one says.
    """
    said = {app_id for facts in known for app_id in facts.txns}
    last = known[0].version - 1 if known else snapshot.version
    return CommitFacts(
        version=TableVersion(last),
        wall_us=WallTimeMicros(known[0].wall_us if known else 0),
        txns=dict(_unsaid(snapshot.txns, said)),
        metadata={"kind": KNOWN_BEFORE_LOG},
    )


def _unsaid(txns: Mapping[str, int], said: set[str]) -> Iterator[tuple[str, int]]:
    return ((app_id, version) for app_id, version in txns.items() if app_id not in said)
