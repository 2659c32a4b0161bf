"""Which way the productions of a superstep take: each slot reads them all, or a shuffle brings each slot its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from millpond.executor.pipeline.topology import Topology
from millpond.executor.python_workers.routed_productions import (
    ROUTED_SCHEMA,
    ConsumerRoute,
    ProductionRoutes,
    make_routing_task,
)
from millpond.executor.python_workers.task_plan import SlotParts, WorkerSetting
from millpond.executor.superstep.delivery import ProductionSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_READ_MAX: Final = 200_000
"""How many productions all slots together may read: beyond it a stage that shuffles them costs less."""


def are_shuffled(productions: int, slots: int) -> bool:
    """Whether a shuffle costs less than to read all productions in each slot that runs.

    Example:
        >>> [are_shuffled(1_000, 16), are_shuffled(100_000, 16), are_shuffled(10_000_000, 1)]
        [False, True, False]
    """
    return slots > 1 and productions * slots > _READ_MAX


def production_routes(
    setting: WorkerSetting,
    topology: Topology,
    parts: SlotParts,
    slots: int,
    sources: Sequence[ProductionSource],
    writers: Mapping[str, int],
) -> ProductionRoutes:
    """Where the productions of committed files go, and which task reads which file.

    Args:
        setting: the store and the code.
        topology: the checked pipeline.
        parts: what runs, by position.
        slots: number of slots.
        sources: the files.
        writers: the slots that have written them, as far as it is known: a task there has them at hand.
    """
    intervals: dict[str, list[tuple[str, int]]] = {}
    for position, part in parts.items():
        intervals.setdefault(part.interval.computation, []).append((part.interval.low, position))
    consumers = []
    for name, mine in intervals.items():
        inbox = topology.computations[name].inbox
        if any(source.concerns(inbox) for source in sources):
            lows, positions = zip(*sorted(mine), strict=True)
            consumers.append(ConsumerRoute(computation=name, lows=lows, positions=positions))
    by_task: dict[int, list[tuple[int, ProductionSource]]] = {}
    for number, source in enumerate(sources):
        by_task.setdefault(writers.get(source.path, number) % slots, []).append((number, source))
    return ProductionRoutes(setting=setting, slots=slots, consumers=tuple(consumers), sources=by_task)


def routed_productions(frame: DataFrame, routes: ProductionRoutes) -> DataFrame:
    """The productions, in a row for each slot and file; not yet moved.

    Args:
        frame: a partition for each slot, whose rows mean nothing.
        routes: what to read, and where it goes.
    """
    return frame.mapInArrow(make_routing_task(routes), ROUTED_SCHEMA)
