"""
Commit requests and a table to commit them to, without row files behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from millpond.statestore.commit import CommitRequest, Committer, IntervalWrite
from millpond.statestore.high_water import MemoryHighWater
from millpond.statestore.log import Log
from millpond.statestore.objects import MemoryObjects
from millpond.statestore.retry import RetryPolicy
from millpond.statestore.row import Fence
from millpond.statestore.rowfile import RowFile, row_file_path
from millpond.statestore.table import create_rows_table
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep
from millpond.testing.determinism import ManualClock, SeededRng
from millpond.testing.faulty_objects import FaultyObjects

if TYPE_CHECKING:
    from millpond.statestore.interval import Interval

__all__ = ["Bench", "fence_request", "row_file", "superstep_request", "write_of"]

_tokens = count()


def row_file(
    interval: Interval, fence: Fence, *, superstep: int = 1, keys: tuple[str, str] = ("", "")
) -> RowFile:
    """
    A row file of the interval, as its writer would describe it.
    """
    low, high = keys if keys[0] else (interval.low or "a", interval.low or "a")
    return RowFile(
        path=row_file_path(interval.computation, Superstep(superstep), f"{next(_tokens):032x}"),
        size_bytes=1_000,
        rows=10,
        min_key=low,
        max_key=high,
        superstep=Superstep(superstep),
        sequencer=fence.sequencer,
        commit_number=fence.commit_number,
        productions=0,
    )


def write_of(interval: Interval, sequencer: int, number: int, *added: RowFile) -> IntervalWrite:
    """
    One interval's part of a commit.
    """
    return IntervalWrite(
        interval=interval, fence=Fence(Sequencer(sequencer), CommitNumber(number)), added=added
    )


def fence_request(sequencer: int, *intervals: Interval) -> CommitRequest:
    """
    Taking the intervals over.
    """
    return CommitRequest(
        kind="fence", writes=tuple(write_of(interval, sequencer, 0) for interval in intervals)
    )


def superstep_request(sequencer: int, number: int, *intervals: Interval, **positions: int) -> CommitRequest:
    """
    One file for each interval, and input positions by name.
    """
    fence = Fence(Sequencer(sequencer), CommitNumber(number))
    return CommitRequest(
        kind="superstep",
        writes=tuple(
            IntervalWrite(
                interval=interval,
                fence=fence,
                added=(row_file(interval, fence, superstep=number),),
                watermark=EventTimeMicros(number),
            )
            for interval in intervals
        ),
        positions={f"millpond/input/p/{name}/local": at for name, at in positions.items()},
    )


@dataclass(slots=True)
class Bench:
    """
    A table in memory, with everything that a committer takes, and faults to plan.
    """

    memory: MemoryObjects = field(default_factory=MemoryObjects)
    clock: ManualClock = field(default_factory=ManualClock)
    rng: SeededRng = field(default_factory=SeededRng)
    high_water: MemoryHighWater = field(default_factory=MemoryHighWater)
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy(tries=3))

    def create(self) -> Bench:
        """
        Make the table.
        """
        create_rows_table(self.log, self.clock, self.rng)
        return self

    @property
    def log(self) -> Log:
        """
        The table's log, without faults.
        """
        return Log(self.memory)

    def committer(self) -> Committer:
        """
        Another process's committer, without faults.
        """
        return Committer(self.log, self.clock, self.rng, self.high_water, retry=self.retry)

    def faulty(self) -> tuple[Committer, FaultyObjects]:
        """
        A committer, and the objects through which faults reach it.
        """
        objects = FaultyObjects(self.memory)
        committer = Committer(Log(objects), self.clock, self.rng, self.high_water, retry=self.retry)
        objects.calls.clear()
        return committer, objects
