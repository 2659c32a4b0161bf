"""Forks that live next to their original: each has separate processes, publishers and auditor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Final

from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.errors import ConflictError, DataError, UnavailableError
from millpond.statestore.history.fork import fork_table
from millpond.statestore.types import TableVersion
from millpond.testing.simulation.chance import Draw
from millpond.testing.simulation.fault import OPERATOR_FAULTS, VERSION_FAULTS
from millpond.testing.simulation.line import Line
from millpond.testing.simulation.operators import Operators
from millpond.testing.simulation.reader import read_sink
from millpond.testing.simulation.versions.bookmark import Bookmark
from millpond.testing.simulation.versions.tool import Tool
from millpond.testing.simulation.violation import must
from millpond.testing.simulation.world import ROWS, World

_FORKS_MAX: Final = 2
_ACTS: Final = 0.5
_PAUSE: Final = 0.1


class Forks:
    """All forks of a store.

    Args:
        original: the store.
        operators: try a fork with the sinks of its original.
    """

    def __init__(self, original: Line, operators: Operators) -> None:
        self._original = original
        self._operators = operators
        self._draw = Draw(f"{original.world.seed}/forks")
        self._lines: list[Line] = []
        self._tried = 0
        self.end_first: bool = self._draw.chance(0.5)

    @property
    def processes(self) -> int:
        """The number of processes born to forks."""
        return sum(len(line.processes) for line in self._lines)

    def act(self, weights: Mapping[str, float]) -> None:
        """Let the users of forks act."""
        for line in self._lines:
            if self._draw.chance(_ACTS):
                line.step(weights)

    def all_die(self, how: str) -> None:
        """End all processes of forks."""
        for line in self._lines:
            line.all_die(how)

    def fork(self, bookmark: Bookmark, *, is_kept: Callable[[], bool]) -> None:
        """Fork the store at a version; the fork continues from now on.

        Args:
            bookmark: the version.
            is_kept: whether it has to be readable now.
        """
        if len(self._lines) >= _FORKS_MAX:
            return
        self._tried += 1
        original, world = self._original, self._original.world
        kinds = [kind for kind in world.swarm.kinds if kind not in (*OPERATOR_FAULTS, *VERSION_FAULTS)]
        place = World(f"{world.seed}-fork-{self._tried}", kinds, original=world)
        tool = Tool(world, f"fork-{self._tried}", original.settings.row_format)
        original.tools.append(tool)
        source, target = world.mount(ROWS), place.mount(ROWS)
        version, must_work = TableVersion(bookmark.version), is_kept()
        tool.run(
            lambda: fork_table(
                source, target, target.url, version, tool.clock, tool.rng, on_progress=self._others_act(tool)
            )
        )
        if tool.error is not None:
            # While it was paused, its version may have left the retention, and been collected before it was pinned.
            may_fail = isinstance(tool.error, (ConflictError, DataError)) and not (must_work and is_kept())
            fair = may_fail or isinstance(tool.error, UnavailableError)
            must(fair, "I10", "a readable version can be forked", version=version, error=tool.error)
        if not any(path.endswith(".checkpoint.parquet") for path in target.list("_delta_log")):
            return
        world.tell(tool.name, f"has forked version {version}")
        self._begin(place, bookmark)

    def _others_act(self, tool: Tool) -> Callable[[int, int], None]:
        def told(_done: int, _of: int) -> None:
            if self._draw.chance(_PAUSE):
                self._original.world.pause(tool)
                tool.must_live()

        return told

    def _begin(self, place: World, bookmark: Bookmark) -> None:
        original = self._original
        line = Line(place, copy.deepcopy(bookmark.workload), original.topology, original.settings)
        line.auditor.begin_with(bookmark.audited)
        line.auditor.remembered = lambda _: bookmark.audited
        line.publisher.begin_with(original.publisher.sent, bookmark.published)
        line.delivered_before = {
            name: read_sink(original.world, name, undone=original.auditor.undone, until=bookmark.superstep)
            for name, node in original.topology.sinks.items()
            if isinstance(node.sink, DeltaSink) and name in original.world.disks
        }
        path = f"_delta_log/{bookmark.version + 1:020d}.json"
        line.auditor.landed(ROWS, path)
        self._operators.check_fork(place.disk(ROWS))
        self._lines.append(line)

    def end(self) -> None:
        """Let all forks drain, compare them with their input, and remove them, possibly after their original."""
        if not self.end_first and self._lines:
            disk = self._original.world.disk(ROWS)
            disk.delete(disk.list(""))
        for line in self._lines:
            line.liveness()
            line.end()
            disk = line.world.disk(ROWS)
            disk.delete(disk.list(""))
