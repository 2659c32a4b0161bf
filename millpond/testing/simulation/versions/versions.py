"""Operators at work on versions: savepoints are made and dropped, and the store is rewound, while all else continues.

What a version must hold is known from the auditor, who read it as it landed: a savepoint's version is that until it is
dropped, and after a rewind the store equals its version, and all input since is redelivered.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from millpond.executor.replay.repair import repair_store
from millpond.executor.replay.repair_plan import plan_rewind, sinks_of_rewind
from millpond.executor.sinks.delta_table import take_back_sink
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import (
    ConflictError,
    DataError,
    FencedError,
    ObjectExistsError,
    OutcomeUnknownError,
    UnavailableError,
)
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.log.high_water import later_mark, list_marks, newest_mark
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.log.table import store_id_of
from millpond.statestore.types import TableVersion
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.fault import VERSION_FAULTS
from millpond.testing.simulation.line import Line
from millpond.testing.simulation.reader import live_files, superstep_of
from millpond.testing.simulation.versions.bookmark import Bookmark
from millpond.testing.simulation.versions.tool import Tool
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.world import FOLDER, ROWS

_BOOKMARK: Final = 0.08
_BOOKMARKS_MAX: Final = 8
_MAKE: Final = 0.03
_DROP: Final = 0.015
_CHECK: Final = 0.03
_REWIND: Final = 0.012
_FORK: Final = 0.012
_WITHIN: Final = 6.0
_TRIES: Final = 5
_SESSION_MS: Final = 11_000
_NAMES: Final = ("before the sale", "after/all", "Δ")
_TRANSIENT: Final = (ConflictError, FencedError, ObjectExistsError, OutcomeUnknownError, UnavailableError)


class Forker(Protocol):
    """Makes forks."""

    def fork(self, bookmark: Bookmark, *, is_kept: Callable[[], bool]) -> None:
        """Fork the store at a version, which must work if it is kept all the while."""
        ...


class Versions:
    """The keeper of a store's versions.

    Args:
        line: the store and its users.
        forker: makes forks of it.
    """

    def __init__(self, line: Line, forker: Forker) -> None:
        self._line = line
        self._forker = forker
        self._draw = Draw(f"{line.world.seed}/versions")
        self._bookmarks: list[Bookmark] = []
        self._savepoints: dict[str, int] = {}
        self._unsure: dict[str, int] = {}
        self._busy: set[str] = set()
        self._tools = 0
        if any(line.world.swarm.knows(kind) for kind in VERSION_FAULTS):
            line.auditor.audited = self._note
            line.auditor.remembered = lambda version: self._bookmark_of(version).audited
            line.meanwhile = lambda: self._act(_WITHIN)

    def act(self) -> None:
        """Perhaps do something; call it while no process is in a turn."""
        self._act(1.0)
        swarm = self._line.world.swarm
        if not swarm.active or not self._bookmarks:
            return
        if swarm.knows("rewound") and self._draw.chance(_REWIND):
            swarm.struck["rewound"] += 1
            self._rewind(self._draw.choice(self._bookmarks))
        elif swarm.knows("forked") and self._draw.chance(_FORK):
            swarm.struck["forked"] += 1
            chosen = self._draw.choice(self._bookmarks)
            self._forker.fork(chosen, is_kept=lambda: self._is_kept(chosen.version))

    def check(self) -> None:
        """Check that each savepoint's version is readable, and unchanged."""
        for name, version in sorted(self._savepoints.items()):
            if name not in self._busy:
                self._line.check_cut(version)

    def _act(self, often: float) -> None:
        swarm, draw = self._line.world.swarm, self._draw
        if not swarm.active or not swarm.knows("savepoints") or self._line.auditor.version < 0:
            return
        if draw.chance(_MAKE * often):
            free = [name for name in _NAMES if name not in {*self._savepoints, *self._unsure, *self._busy}]
            if free:
                swarm.struck["savepoints"] += 1
                known = [bookmark.version for bookmark in self._bookmarks]
                self._make(free[0], draw.choice([*known, None, None]))
        if draw.chance(_DROP * often):
            made = sorted({*self._savepoints, *self._unsure} - self._busy)
            if made:
                self._drop(draw.choice(made))
        if draw.chance(_CHECK):
            self.check()

    # -- knowledge -------------------------------------------------------------------------

    def _note(self, version: int, kind: str) -> None:
        line = self._line
        line.pictures[version] = {computation: dict(rows) for computation, rows in line.auditor.rows.items()}
        if kind.startswith("rewind "):
            self._go_back(self._bookmark_of(int(kind.removeprefix("rewind "))))
            return
        if self._draw.chance(_BOOKMARK):
            self._bookmarks.append(
                Bookmark(
                    audited=line.auditor.at_present(),
                    workload=copy.deepcopy(line.workload),
                    published=line.publisher.published(),
                )
            )
            if len(self._bookmarks) > _BOOKMARKS_MAX:
                kept = set(self._savepoints.values())
                self._bookmarks.remove(
                    next((b for b in self._bookmarks if b.version not in kept), self._bookmarks[0])
                )

    def _go_back(self, bookmark: Bookmark) -> None:
        """What is outside of the store goes back with it, as operators see to."""
        line = self._line
        # Those who have the workload keep it.
        vars(line.workload).update(copy.deepcopy(vars(bookmark.workload)))
        line.publisher.go_back(bookmark.published)
        for process in line.processes:
            process.inbox.clear()
        # The sinks no longer have all output of an undone version.
        self._bookmarks = [known for known in self._bookmarks if known.version <= bookmark.version]

    def _bookmark_of(self, version: int) -> Bookmark:
        return next(bookmark for bookmark in self._bookmarks if bookmark.version == version)

    def _is_kept(self, version: int) -> bool:
        return version >= self._line.oldest_readable() or any(
            version == at for name, at in self._savepoints.items() if name not in self._busy
        )

    def _tool(self, command: str, *, is_safe: bool = False) -> Tool:
        self._tools += 1
        line = self._line
        tool = Tool(line.world, f"{command}-{self._tools}", line.settings.row_format, is_safe=is_safe)
        line.tools.append(tool)
        return tool

    # -- savepoints ------------------------------------------------------------------------

    def _make(self, name: str, version: int | None) -> None:
        """Make a savepoint, again and again until it is certain whether it is there."""
        self._busy.add(name)
        was_kept = version is None or self._is_kept(version)
        for attempt in range(_TRIES):
            tool = self._tool("savepoint", is_safe=attempt == _TRIES - 1)
            made = tool.run(lambda: tool.store().savepoint(name, version))  # noqa: B023 - called at once
            if made is not None:
                self._line.world.tell(tool.name, f"keeps version {made.version} as {made.name}")
                self._savepoints[name] = int(made.version)
                self._line.check_cut(int(made.version))
                break
            if isinstance(tool.error, DataError) or type(tool.error) is ConflictError:
                still = was_kept and (version is None or self._is_kept(version))
                must(not still, "I10", "a savepoint is made of what is readable", error=tool.error)
                break
            must(
                tool.error is None or isinstance(tool.error, _TRANSIENT),
                "I10",
                "a savepoint fails for a reason",
                error=tool.error,
            )
        else:
            self._unsure[name] = -1 if version is None else version
        self._busy.discard(name)

    def _drop(self, name: str) -> None:
        self._busy.add(name)
        version = self._savepoints.pop(name, self._unsure.get(name, -1))
        self._unsure[name] = version
        tool = self._tool("drop")
        tool.run(lambda: tool.store().drop_savepoint(name))
        if tool.has_succeeded:
            del self._unsure[name]
        self._busy.discard(name)

    # -- rewinds ---------------------------------------------------------------------------

    def _rewind(self, bookmark: Bookmark) -> None:
        """Stop what runs, rewind, and rerun the command while it fails or dies."""
        line, draw = self._line, self._draw
        must_work, takes_back = self._is_kept(bookmark.version), draw.chance(0.7)
        rewinds = len(line.auditor.undone)
        self._stop_processes()
        for attempt in range(_TRIES):
            tool = self._tool("rewind", is_safe=attempt == _TRIES - 1)
            began = line.auditor.version
            tool.run(lambda: self._run_rewind(tool, bookmark, takes_back=takes_back))  # noqa: B023
            if tool.has_succeeded:
                line.world.tell(tool.name, f"has rewound to version {bookmark.version}")
                self._check_rewound(line.auditor.undone[rewinds:] if takes_back else ())
                return
            if isinstance(tool.error, DataError):
                still = must_work and self._is_kept(bookmark.version)
                must(not still, "I10", "a readable version can come back", error=tool.error)
                return
            must(
                tool.error is None or isinstance(tool.error, _TRANSIENT),
                "I10",
                "a rewind fails for a reason",
                error=tool.error,
            )
            if not takes_back and line.auditor.version > began and draw.chance(0.5):
                # It had come far enough.
                return
            line.world.pass_time(_SESSION_MS)

    def _stop_processes(self) -> None:
        for process in self._line.alive():
            if not process.is_busy and self._draw.chance(0.5):
                process.stop()
            elif not process.is_busy:
                process.kill("before a rewind")

    def _run_rewind(self, tool: Tool, bookmark: Bookmark, *, takes_back: bool) -> None:
        """What ``millpond rewind`` does."""
        world, disk = self._line.world, tool.disk(ROWS)
        snapshot = load(Log(disk))
        lineage = Lineage.of(store_id_of(snapshot), snapshot.txns)
        known = [incarnation.id for incarnation in lineage.incarnations]
        mark = later_mark(tool.leases.high_water.read(), newest_mark(list_marks(world.disk(FOLDER)), known))
        plan = plan_rewind(disk, TableVersion(bookmark.version), mark)
        repair_store(disk, plan, tool.leases, tool.clock, tool.rng)
        if takes_back:
            for name in self._sinks():
                table = tool.disk(name)
                if Log(table).latest_version() is not None:
                    take_back_sink(table, lineage, sinks_of_rewind(plan), tool.clock, tool.rng)

    def _sinks(self) -> list[str]:
        sinks = self._line.topology.sinks.items()
        return [name for name, node in sinks if isinstance(node.sink, DeltaSink)]

    def _check_rewound(self, undone: Sequence[tuple[int, int]]) -> None:
        """The store reads as at its version, and no sink has undone output."""
        line = self._line
        line.check_cut(line.auditor.version)
        for name in self._sinks():
            left = [
                path
                for path in live_files(line.world.disk(name))
                if any(first <= superstep_of(path) <= last for first, last in undone)
            ]
            must(not left, "I2", "what was undone goes out of the sink", sink=name, files=left)
