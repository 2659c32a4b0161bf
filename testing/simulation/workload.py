"""
Workloads: what is simulated. A pipeline, the records that go into it, and what must come of them.

Write one of your own to find out what your computations do when processes die, messages come
twice and clocks jump::

    class Clicks(Workload):
        name = "clicks"

        def pipeline(self):
            pipeline = mp.Pipeline("clicks")
            clicks = pipeline.inject("clicks", key="page", at="at", id="id", watermark=mp.ManualWatermark())
            clicks.apply(CountClicks(), name="counter")
            return pipeline

        def record(self, draw, number):
            return "clicks", {"page": draw.choice(["home", "shop"])}

        def check_end(self, end):
            counted = sum(state["count"] for state in end.states["counter"].values())
            must(counted == len(end.sent), "I1", "every click counts once")

    $ python -m millpond.testing.simulate --workload mymodule:Clicks --seeds 200
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.testing.simulation.chance import Draw

__all__ = ["End", "RowVersion", "Sent", "Workload"]


@dataclass(slots=True)
class Sent:
    """
    A record that a publisher has sent.

    Attributes:
        number: 0, 1, 2 … in the order of creation.
        stream: the injected stream.
        row: the record, its ``id`` and ``at`` included.
        created_us: when it was created, in the world's time.
        acknowledged_us: when its publisher learned that its effects are durable.
    """

    number: int
    stream: str
    row: dict[str, Any]
    created_us: int
    acknowledged_us: int | None = None


@dataclass(frozen=True, slots=True)
class RowVersion:
    """
    What a table version says about a key.

    Attributes:
        sequencer: of the lease under which it was written.
        commit_number: within that lease.
        superstep: that wrote it.
        state: the decoded state; ``None`` when there is none.
        timers: pending timers: (tag, domain, time).
        record_ids: ids of outside records that were consumed by this very update.
        productions: what this very update produced: (stream, key, decoded value, time).
        table_version: the version that brought it.
    """

    sequencer: int
    commit_number: int
    superstep: int
    state: Any
    timers: tuple[tuple[str, str, int], ...]
    record_ids: tuple[bytes, ...]
    productions: tuple[tuple[str, str, Any, int], ...]
    table_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """
    What is there when all faults are over and everything has been processed.

    Attributes:
        sent: every record that a publisher has sent; all are acknowledged.
        states: decoded states by computation and key, read as any reader reads them.
        sinks: rows of the tables that sinks have filled, in the order of their commits.
        letters: dead letters, decoded.
    """

    sent: Sequence[Sent]
    states: Mapping[str, Mapping[str, Any]]
    sinks: Mapping[str, Sequence[Mapping[str, Any]]]
    letters: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


class Workload:
    """
    Base class: say what runs and what goes in; check as much as you know.

    Attributes:
        name: for the report.
        records_max: how many records a seed creates at most.
    """

    name = "workload"
    records_max = 120

    def begin(self, draw: Draw) -> None:
        """
        Decide by chance what this seed's pipeline looks like, before it is declared the first time.
        """

    def pipeline(self) -> EnginePipeline:
        """
        Declare the pipeline, anew for each process.

        Its injectors need ``id="id"``, ``at="at"`` and ``watermark=ManualWatermark()``: publishers
        repeat records until they are acknowledged, and promise times themselves. Sinks into
        Delta tables write to disks of the simulated world; others are left alone.
        """
        raise NotImplementedError

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:
        """
        Make a record: its stream and its fields; ``id`` and ``at`` are added.

        Args:
            draw: chance.
            number: how many were made before.
            poison: make one whose processing raises; a workload without such records ignores it.
        """
        raise NotImplementedError

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """
        Check one row update of a superstep, as soon as it is committed.
        """

    def check_version(self, version: int, productions: Sequence[tuple[str, str, Any, int]]) -> None:
        """
        Check a table version, after its rows; ``productions`` are those that nobody has consumed yet.
        """

    def check_cut(self, version: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """
        Check what a reader sees at a table version: decoded states by computation and key.
        """

    def check_end(self, end: End) -> None:
        """
        Check what is there at the end.
        """
