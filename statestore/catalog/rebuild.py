"""Rebuilding the catalog from the log: from the remaining commits, and from the snapshot for older ones.

Old commit files are cleaned up, but the newest ``txn`` of every app id stays in the
snapshot. So one synthetic commit replaces all deleted ones, and then the remaining commits
are recorded exactly as when they were made.

The topologies that the log tells of: which version had which computations, sinks and code.

Each start of a pipeline, and each update of a running one, says in its commit which pipeline runs from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sqlalchemy import Connection

from millpond.statestore.catalog.commits import prune_journals, write_commits
from millpond.statestore.catalog.engine import INPUT_POSITIONS, INTERVALS, LEASES, SUPERSTEPS, WATERMARKS
from millpond.statestore.catalog.entries import (
    KNOWN_BEFORE_LOG,
    CatalogLimits,
    CommitFacts,
    PipelineDefinition,
    definition_from_metadata,
)
from millpond.statestore.catalog.topology import TopologyChange, change_between
from millpond.statestore.log.action import Action, CommitInfo, Txn
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.types import TableVersion, WallTimeMicros

_COMMITS_PER_BATCH: Final = 256


class LogState(Protocol):
    """The part of a log's snapshot that `Catalog.rebuild` needs."""

    @property
    def version(self) -> TableVersion:
        """The newest table version."""
        ...

    @property
    def txns(self) -> Mapping[str, int]:
        """The newest ``txn`` version of every app id."""
        ...


def facts_of(version: TableVersion, actions: Iterable[Action]) -> CommitFacts:
    """The facts of a commit file; a commit of another engine has only its time."""
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
    """The facts of the remaining commit files, newest first, at most ``limit`` of them.

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
    """Replace all entries that derive from the log: `Catalog.rebuild` within a transaction."""
    known = sorted(
        (facts for facts in commits if facts.version <= snapshot.version),
        key=lambda facts: facts.version,
    )
    _delete_commits(connection, snapshot.version)
    write_commits(connection, (_facts_before(snapshot, known),), limits)
    for start in range(0, len(known), _COMMITS_PER_BATCH):
        write_commits(connection, known[start : start + _COMMITS_PER_BATCH], limits)
    prune_journals(connection, limits)


def _delete_commits(connection: Connection, version: TableVersion) -> None:
    for table in (INTERVALS, LEASES, INPUT_POSITIONS):
        connection.execute(table.delete())
    for journal in (SUPERSTEPS, WATERMARKS):
        connection.execute(journal.delete().where(journal.c.version > version))


def _facts_before(snapshot: LogState, known: Sequence[CommitFacts]) -> CommitFacts:
    """A synthetic commit for all those whose files are gone: every ``txn`` that no known commit has."""
    later = {app_id for facts in known for app_id in facts.txns}
    last = known[0].version - 1 if known else snapshot.version
    return CommitFacts(
        version=TableVersion(last),
        wall_us=WallTimeMicros(known[0].wall_us if known else 0),
        txns={app_id: version for app_id, version in snapshot.txns.items() if app_id not in later},
        metadata={"kind": KNOWN_BEFORE_LOG},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTopology:
    """A topology, from the version on that brought it.

    Attributes:
        version: the version of the commit that says so.
        wall_us: when that was.
        is_update: whether a running pipeline was changed; otherwise one was started.
        definition: the pipeline.
        change: by what it differs from the one before it; ``None`` if the log does not reach back to that.
    """

    version: TableVersion
    wall_us: WallTimeMicros
    is_update: bool
    definition: PipelineDefinition
    change: TopologyChange | None


def logged_topologies(log: Log, newest: TableVersion) -> list[LoggedTopology]:
    """The topologies of all pipelines in the remaining commits, oldest first; a start that changes nothing is left out.

    Raises:
        DataError: a commit file is damaged.
    """
    commits = list(_commits(log, newest))
    is_whole = not commits or commits[-1][0] == 0
    known: dict[str, PipelineDefinition] = {}
    topologies: list[LoggedTopology] = []
    for version, data in reversed(commits):
        facts = facts_of(version, decode(data, commit_path(version))) if data else None
        definition = None if facts is None else definition_from_metadata(facts.metadata)
        if facts is None or definition is None or known.get(definition.name) == definition:
            continue
        former = known.get(definition.name)
        change = change_between(former, definition) if former is not None or is_whole else None
        known[definition.name] = definition
        topologies.append(
            LoggedTopology(
                version=version,
                wall_us=facts.wall_us,
                is_update=facts.metadata.get("kind") == "topology",
                definition=definition,
                change=change,
            )
        )
    return topologies


def _commits(log: Log, newest: TableVersion) -> Iterator[tuple[TableVersion, bytes]]:
    """The remaining commits, newest first; of most, which tell of no topology, the bytes are not kept."""
    for version in range(newest, -1, -1):
        data = log.read(TableVersion(version))
        if data is None:
            return
        yield TableVersion(version), data if b'"definition"' in data else b""
