"""The topologies that the log tells of: which version had which computations, sinks and code.

Each start of a pipeline, and each update of a running one, says in its commit which pipeline runs from then on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from millpond.statestore.catalog.entries import PipelineDefinition
from millpond.statestore.catalog.facts import definition_from_metadata
from millpond.statestore.catalog.rebuild import facts_of
from millpond.statestore.catalog.topology_change import TopologyChange, change_between
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.types import TableVersion, WallTimeMicros


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
