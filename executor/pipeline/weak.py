"""
Weak productions: delivered before the checkpoint that would make them durable (MillWheel §6.1.3).

A computation that says ``productions="weak"`` hands its productions to their consumers within the
superstep that made them: its streams are *fused* with their consumers. What the consumers make of
them is part of the same commit, so in the store nothing is lost and nothing counts twice. What is
given up is that consumers' code only ever sees records that are durable.

Not fused, and so delivered as if they were strong, are streams whose records could come back to
their producer by weak productions (a superstep would never end), and streams with a consumer that
also takes outside records (they come before anything is produced).

A production that is kept all the same is *addressed*: the stream it is kept under says who still
waits for it. ``visits@cities`` waits for the computation ``cities`` only, which was too slow to get
it within its superstep; ``visits@`` waits for no computation, but for sinks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from millpond.executor.pipeline.topology import ComputationNode

__all__ = [
    "STRONG",
    "ProductionMode",
    "WeakStreams",
    "addressed",
    "fused_order",
    "fused_streams",
    "is_addressed",
]

ProductionMode: TypeAlias = Literal["strong", "weak"]
"""When a production is delivered: once its checkpoint is durable, or before."""

_MARK: Final = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakStreams:
    """
    What becomes of a computation's productions within a superstep.

    Attributes:
        fused: the streams whose productions go to their consumers before the commit.
        kept: those of them whose productions are written to the producer's rows all the same,
            for a sink or to be handed to another task.
    """

    fused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


STRONG: Final = WeakStreams()
"""Every production waits for its checkpoint."""


def addressed(stream: str, consumer: str = "") -> str:
    """
    The stream under which a fused production is kept for one computation, or for sinks only.

    Example:
        >>> addressed("visits", "cities")
        'visits@cities'
    """
    return f"{stream}{_MARK}{consumer}"


def is_addressed(stream: str) -> bool:
    """
    Whether a stream of kept productions has been delivered to other consumers already.
    """
    return _MARK in stream


def fused_streams(
    computations: Mapping[str, ComputationNode], injected: Mapping[str, object]
) -> dict[str, frozenset[str]]:
    """
    The streams of each computation whose productions are delivered within their superstep.

    Args:
        computations: by name.
        injected: the injected streams.
    """
    return {
        name: frozenset(stream for stream in node.produces if _is_fused(node, stream, computations, injected))
        for name, node in computations.items()
        if node.productions == "weak"
    }


def _is_fused(
    producer: ComputationNode,
    stream: str,
    computations: Mapping[str, ComputationNode],
    injected: Mapping[str, object],
) -> bool:
    consumers = list(_consumers(stream, computations))
    takes_outside = any(each.stream in injected for node in consumers for each in node.subscriptions)
    return bool(consumers) and not takes_outside and producer.name not in _reached(consumers, computations)


def _consumers(stream: str, computations: Mapping[str, ComputationNode]) -> Iterator[ComputationNode]:
    return (node for node in computations.values() if node.subscription(stream) is not None)


def _reached(start: list[ComputationNode], computations: Mapping[str, ComputationNode]) -> set[str]:
    """
    Whom records may reach by weak productions, those at the start included.
    """
    found: set[str] = set()
    fresh = list(start)
    while fresh:
        node = fresh.pop()
        if node.name not in found:
            found.add(node.name)
            if node.productions == "weak":
                fresh += [other for stream in node.produces for other in _consumers(stream, computations)]
    return found


def fused_order(
    computations: Mapping[str, ComputationNode], fused: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """
    The computations so that each comes after those whose fused streams it consumes.
    """
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(sorted(computations), ()))
    for producer in sorted(fused):
        for stream in sorted(fused[producer]):
            for consumer in _consumers(stream, computations):
                sorter.add(consumer.name, producer)
    return tuple(sorter.static_order())
