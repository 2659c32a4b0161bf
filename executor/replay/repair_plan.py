"""Plans of repairs and rewinds: which version of a store to restore, and how. Planning changes nothing.

A damaged file that a compaction wrote is replaced by the compacted files, if these still exist; nothing is lost.
Otherwise the whole table returns to the newest version all of whose files are intact: state, timers, ids and
productions of all keys together with the positions of all inputs, so that later input is read again.

A rewind is a repair of a sound store to a chosen version. Undone versions stay readable like other old versions, so a
rewind can itself be rewound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import RESTORED_APP_ID, AppId, supersteps_of
from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError
from millpond.statestore.history.replayed_log import (
    TableHistory,
    TableState,
    read_commit,
    read_histories,
    readable_commits,
    repair_bit_flip,
    replay_log,
)
from millpond.statestore.history.savepoint import refuse_collected
from millpond.statestore.log.action import Add, Metadata, Protocol
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import LOG_FOLDER, Log, LogInventory, commit_path
from millpond.statestore.log.snapshot import RESTORED_VERSION, load, table_version
from millpond.statestore.log.table import rows_metadata
from millpond.statestore.log.writer import log_boundary
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.row_format import parquet_seal_holds
from millpond.statestore.types import Objects, Superstep, TableVersion

_COMPACTION_KINDS: Final = frozenset({"compaction", "fold"})
"""The commit kinds of compactions: the current one, and the one of stores of 0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A damaged file, and intact files with the same contents."""

    path: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairPlan:
    """A plan to repair or rewind a store."""

    newest: TableVersion  # that ever existed, by the log and the mark
    state: TableState  # the restored table; the repair then advances some of its transactions
    history: TableHistory  # the log as far as it can be read
    txns: dict[str, int]  # the newest ones in any readable commit
    is_readable: bool  # the log can be read to its end, so older versions stay readable
    healed: Mapping[str, bytes] = field(default_factory=dict)  # files with one flipped bit, by path
    restored: tuple[Restored, ...] = ()
    lost: tuple[str, ...] = ()  # damaged or missing live files without a substitute
    set_aside: tuple[str, ...] = ()  # files to remove from the log; copies are kept
    kind: str = "repair"  # or "rewind": the commit's kind
    source_offsets: Mapping[str, str] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        return bool(self.healed or self.set_aside or self.restored or self.is_rollback or self.form)

    @property
    def form(self) -> tuple[Protocol, Metadata] | None:
        """The protocol and metadata to restore because another engine switched a feature on; ``None`` otherwise."""
        metadata = self.history.metadata
        if metadata is None or not self.history.duties:
            return None
        # Only a checkpoint of the other engine may be left, which has no earlier form.
        return self.history.own_form or (Protocol(), rows_metadata(metadata))

    @property
    def is_rollback(self) -> bool:
        return self.state.version < self.newest

    def consumed(self) -> dict[str, int]:
        """Return the consumed position after the repair, by source of an input; -1 for none."""
        newest: dict[str, int] = {}
        for app_id in self.txns:
            if app_id.startswith(AppId.INPUT):
                source = unquote(app_id.rpartition("/")[2])
                newest[source] = max(self.state.txns.get(app_id, -1), newest.get(source, -1))
        return newest

    def moved(self, kind: AppId) -> dict[str, tuple[int, int]]:
        """Return the last superstep or consumed position after and before the repair, by application id; -1 for none."""
        return {
            app_id: (self.state.txns.get(app_id, -1), was)
            for app_id, was in sorted(self.txns.items())
            if app_id.startswith(kind) and self.state.txns.get(app_id, -1) != was
        }


class _Files:
    """Checks of row files; each file is read once, and flipped bits are repaired in memory."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._whole: dict[str, bool] = {}
        self.healed: dict[str, bytes] = {}

    def is_whole(self, path: str) -> bool:
        if path not in self._whole:
            try:
                read_row_files(self._objects, [path])
            except DataError:
                self._whole[path] = self._heal(path)
            else:
                self._whole[path] = True
        return self._whole[path]

    def _heal(self, path: str) -> bool:
        try:
            damaged = self._objects.get(path)
        except ObjectMissingError:
            return False
        name, memory = path.rpartition("/")[2], MemoryObjects()
        whole = repair_bit_flip(damaged, lambda data: parquet_seal_holds(memoryview(data), name))
        if whole is None:
            return False
        memory.put(path, whole)
        try:
            read_row_files(memory, [path])
        except DataError:
            return False
        self.healed[path] = whole
        return True

    def sources_of(self, path: str, history: TableHistory) -> tuple[Add, ...] | None:
        change = history.maker_of(path)
        if change is None or change.kind not in _COMPACTION_KINDS:
            return None
        interval = next(add.tags.get("interval") for add in change.added if add.path == path)
        sources: list[Add] = []
        for source in change.removed:
            if source.tags.get("interval") != interval:
                continue
            intact = (source,) if self.is_whole(source.path) else self.sources_of(source.path, history)
            if intact is None:
                return None
            sources += intact
        return tuple(sources) or None


def plan_repair(objects: Objects, mark: Mark | None) -> RepairPlan:
    """Find the newest state that can be restored; ``mark`` is the high-water mark, if it is known."""
    log, files = Log(objects), _Files(objects)
    inventory = log.inventory()
    latest = max(-1 if inventory.latest is None else inventory.latest, -1 if mark is None else mark.version)
    newest, lost = TableVersion(latest), set[str]()
    for history in read_histories(log, mark):
        bad = set[str]()
        for state, came_back in history.states():
            bad = {path for path in bad if path in state.live}
            bad |= {path for path in came_back if not files.is_whole(path)}
            sources = {path: files.sources_of(path, history) for path in bad}
            gone = [path for path, adds in sources.items() if adds is None]
            if gone:
                lost.update(gone)
                continue
            restored = []
            for path, adds in sorted(sources.items()):
                del state.live[path]
                state.live |= {add.path: add for add in adds or ()}
                restored.append(Restored(path=path, sources=tuple(add.path for add in adds or ())))
            is_readable = history.newest == newest
            txns = history.state.txns
            beyond = (version for version in inventory.versions if version > history.newest)
            for commit in readable_commits(log, beyond):
                txns |= {app_id: max(at, txns.get(app_id, at)) for app_id, at in commit.txns.items()}
            return RepairPlan(
                newest=newest,
                state=state,
                history=history,
                healed={path: data for path, data in files.healed.items() if path in state.live}
                | {commit_path(version): data for version, data in history.healed.items()},
                restored=tuple(restored),
                lost=tuple(sorted(lost)),
                set_aside=_set_aside(log, inventory, history, is_readable=is_readable),
                txns=txns,
                is_readable=is_readable,
            )
    raise DataError(
        "no version of the store is intact: restore it from a copy", store=objects.url, lost=len(lost)
    )


def _set_aside(
    log: Log, inventory: LogInventory, history: TableHistory, *, is_readable: bool
) -> tuple[str, ...]:
    broken = set[str]()
    for checkpoint in inventory.checkpoints:
        try:
            tuple(log.read_checkpoint(checkpoint))
        except DataError:
            broken.update(checkpoint.paths)
    if not is_readable:
        names = ((path, path.removeprefix(f"{LOG_FOLDER}/")) for path in log.objects.list(LOG_FOLDER))
        return tuple(path for path, name in names if name[:20].isdecimal())
    boundary = log_boundary(log.objects)
    before = [version for version in inventory.versions if boundary <= version < history.start]
    if not history.is_start_chained and history.start in inventory.versions:
        before.append(history.start)
    whole = range(before[0], history.start) if before else range(0)
    if before and (list(whole) != before or len(list(readable_commits(log, before))) < len(before)):
        # A reader begins with the first commit, so all commits before the checkpoint are removed together.
        broken.update(commit_path(version) for version in before)
        broken.update(
            path
            for checkpoint in inventory.checkpoints
            if checkpoint.version < history.start
            for path in checkpoint.paths
        )
    return tuple(sorted(broken))


def plan_rewind(objects: Objects, version: TableVersion, mark: Mark | None) -> RepairPlan:
    """Plan to return a sound store to a version; ``mark`` is the high-water mark, if it is known."""
    log = Log(objects)
    latest = log.latest_version()
    histories = read_histories(log, mark)
    # A commit between these two reads makes the rewind's own commit fail, because its version is taken.
    marked = -1 if mark is None else mark.version
    is_damaged = not histories or latest is None or histories[0].newest < latest or marked > latest
    if is_damaged or histories[0].duties:
        raise DataError("the log is damaged: repair the store first (`millpond repair`)", store=objects.url)
    history = histories[0]
    if table_version(version) > history.newest:
        raise InvalidError(
            "there is no such table version (see `millpond history`)", version=version, newest=history.newest
        )
    replayed = replay_log(log, version)
    refuse_collected(objects, version, replayed.adds)
    return RepairPlan(
        newest=history.newest,
        state=TableState(version=version, live=dict(replayed.adds), txns=dict(replayed.snapshot.txns)),
        history=history,
        txns=history.state.txns,
        is_readable=True,
        kind="rewind",
        source_offsets=dict(replayed.snapshot.source_offsets),
        watermarks=dict(replayed.snapshot.watermarks),
    )


def undone_by(objects: Objects, plan: RepairPlan) -> TableVersion | None:
    """Return the newest rewind or repair that undid the plan's version; ``None`` if the version was never undone."""
    log, at = Log(objects), plan.txns.get(RESTORED_APP_ID, -1)
    while at > plan.state.version:
        commit = read_commit(log, TableVersion(at))
        # A commit that is gone may have undone it.
        if commit is None or int(str(commit.metadata.get(RESTORED_VERSION, -1))) < plan.state.version:
            return TableVersion(at)
        at = load(log, TableVersion(at - 1)).txns.get(RESTORED_APP_ID, -1)
    return None


def sinks_of_rewind(plan: RepairPlan) -> dict[str, Superstep]:
    """Return, by pipeline, the superstep that a sink's table is rewound to.

    It is the superstep before the version's last one, whose productions are undelivered there and will be delivered
    under another number, also if no superstep is undone.
    """
    if not plan.is_rollback:
        return {}
    then = supersteps_of(plan.state.txns)
    return {pipeline: Superstep(max(then.get(pipeline, 0) - 1, 0)) for pipeline in supersteps_of(plan.txns)}
