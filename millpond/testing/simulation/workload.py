"""Workloads: a pipeline to simulate, the records that go into it, and the promises about its results.

Write your own to find out how your computations behave when processes die, messages are
repeated and clocks jump::

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


@dataclass(slots=True)
class Sent:
    """A record that a publisher has sent.

    Attributes:
        number: 0, 1, 2 … in order of creation.
        stream: the injected stream.
        row: the record, including its ``id`` and ``at``.
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
    """A key's row in a table version.

    Attributes:
        sequencer: of the lease under which it was written.
        commit_number: within that lease.
        superstep: the superstep that wrote it.
        state: the decoded state; ``None`` if there is none.
        timers: pending timers: (tag, domain, time).
        record_ids: ids of the outside records that this update consumed.
        productions: what this update produced: (stream, key, decoded value, time).
        table_version: the version that committed it.
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
    """The final state, after all faults, with everything processed.

    Attributes:
        sent: every record that a publisher sent; all are acknowledged.
        states: decoded states by computation and key, as a reader sees them.
        sinks: rows of the sinks' tables, in the order of their commits.
        letters: dead letters, decoded.
    """

    sent: Sequence[Sent]
    states: Mapping[str, Mapping[str, Any]]
    sinks: Mapping[str, Sequence[Mapping[str, Any]]]
    letters: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


class Workload:
    """Base class: declare the pipeline and its input, and check the results.

    Attributes:
        name: for the report.
        records_max: the most records that a seed creates.
        takes_late_records: whether the checks hold when records are days behind the low watermark. Without it
            the clocks of publishers are never fast.
        has_late_records: whether this seed may have such records; the simulator sets it before `begin`.
    """

    name = "workload"
    records_max = 120
    takes_late_records = False
    has_late_records = False

    def begin(self, draw: Draw) -> None:
        """Draw this seed's variant of the pipeline, before it is first declared."""

    def pipeline(self) -> EnginePipeline:
        """Declare the pipeline; called for each process.

        Its injectors need ``id="id"``, ``at="at"`` and ``watermark=ManualWatermark()``: publishers
        repeat records until they are acknowledged, and promise watermarks themselves. Sinks into
        Delta tables write to disks of the simulated world; other sinks are used unchanged.
        """
        raise NotImplementedError

    def record(self, draw: Draw, number: int, *, poison: bool = False) -> tuple[str, dict[str, Any]]:
        """Create a record: its stream and its fields; ``id`` and ``at`` are added.

        Args:
            draw: the source of randomness.
            number: number of records created before.
            poison: create a record whose processing raises; a workload without such records ignores it.
        """
        raise NotImplementedError

    def check_row(self, computation: str, key: str, before: RowVersion | None, after: RowVersion) -> None:
        """Check one row update of a superstep, right after its commit."""

    def check_version(self, version: int, productions: Sequence[tuple[str, str, Any, int]]) -> None:
        """Check a table version, after its rows; ``productions`` are the unconsumed ones."""

    def check_cut(self, version: int, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Check a reader's view of a table version: decoded states by computation and key."""

    def check_end(self, end: End) -> None:
        """Check the final state."""
