"""Fused streams: which weak productions reach their consumers within the superstep that made them.

A stream is not fused, and so is delivered as if it were strong, where its records could come back to
their producer by weak productions (a superstep would never end), and where a consumer also takes
outside records (they come before anything is produced).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter

from millpond.executor.pipeline.nodes import ComputationNode


def fused_streams(
    computations: Mapping[str, ComputationNode], injected: Mapping[str, object]
) -> dict[str, frozenset[str]]:
    """The streams of each computation whose productions are delivered within their superstep.

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
    takes_outside = any(
        subscription.stream in injected for node in consumers for subscription in node.subscriptions
    )
    return bool(consumers) and not takes_outside and producer.name not in _reached(consumers, computations)


def _consumers(stream: str, computations: Mapping[str, ComputationNode]) -> Iterator[ComputationNode]:
    return (node for node in computations.values() if node.subscription(stream) is not None)


def _reached(start: list[ComputationNode], computations: Mapping[str, ComputationNode]) -> set[str]:
    """Whom records may reach by weak productions, those at the start included."""
    visited: set[str] = set()
    fresh = list(start)
    while fresh:
        node = fresh.pop()
        if node.name not in visited:
            visited.add(node.name)
            if node.productions == "weak":
                fresh += [other for stream in node.produces for other in _consumers(stream, computations)]
    return visited


def fused_order(
    computations: Mapping[str, ComputationNode], fused: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """The computations so that each comes after those whose fused streams it consumes."""
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(sorted(computations), ()))
    for producer in sorted(fused):
        for stream in sorted(fused[producer]):
            for consumer in _consumers(stream, computations):
                sorter.add(consumer.name, producer)
    return tuple(sorter.static_order())
