"""Cycles of a topology, and which edges hold the watermark: all but those that are declared a feedback.

Around a cycle of edges that hold, a watermark waits for itself: nothing in it fires that owes a production at
an earlier time than its own. A *feedback* cuts the cycle. It holds back nothing of what could still come, but
does hold what is on its way; other producers to the same stream hold as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.topology import Topology

Cycle = tuple[tuple[str, str], ...]
"""The way around: each computation with the stream on which it reaches the next one."""

_Edges = Mapping[str, tuple[tuple[str, str], ...]]


def holding_edges(topology: Topology) -> _Edges:
    """For each computation, the streams and consumers whose input watermarks its output watermark bounds."""
    behind = {
        name: _reached(topology, node)
        for name, node in topology.computations.items()
        if any(subscription.feedback for subscription in node.subscriptions)
    }
    return {
        name: tuple(
            (stream, consumer)
            for stream, consumer, is_feedback in _edges(topology, node)
            if not (is_feedback and name in behind[consumer])
        )
        for name, node in topology.computations.items()
    }


def bounded_by_injectors(topology: Topology) -> set[str]:
    """The computations whose input watermark an injector bounds, directly or through the outputs of others."""
    edges = holding_edges(topology)
    # An unreadable outside record becomes a dead letter before any computation sees it.
    bounded = set(topology.readers_of([*topology.injectors, DEAD_LETTERS]))
    fresh = list(bounded)
    while fresh:
        more = {consumer for _, consumer in edges[fresh.pop()]} - bounded
        bounded |= more
        fresh += more
    return bounded


def comes_back(topology: Topology, node: ComputationNode, stream: str) -> bool:
    """Whether a computation that is reached from ``node``, such as itself, produces to ``stream``."""
    reached = _reached(topology, node)
    return any(producer.name in reached for producer in topology.producers_of(stream))


def cycle_of(edges: _Edges, name: str) -> Cycle:
    """The shortest way from a computation back to itself; empty if there is none.

    Args:
        edges: see `holding_edges`.
        name: the computation.
    """
    ways: dict[str, Cycle] = {name: ()}
    fresh = [name]
    # It grows by each computation at most once.
    for here in fresh:
        for stream, consumer in edges[here]:
            way = (*ways[here], (here, stream))
            if consumer == name:
                return way
            if consumer not in ways:
                ways[consumer] = way
                fresh.append(consumer)
    return ()


def is_in_cycle(topology: Topology, node: ComputationNode) -> bool:
    """Whether records may come back to a computation, on a feedback or another way."""
    return any(
        node.name in _reached(topology, topology.computations[consumer])
        for _, consumer, _ in _edges(topology, node)
    )


def _reached(topology: Topology, node: ComputationNode) -> set[str]:
    """Whom records may reach from a computation; itself too, as it may produce to itself."""
    visited: set[str] = {node.name}
    fresh = [node]
    while fresh:
        for _, consumer, _ in _edges(topology, fresh.pop()):
            if consumer not in visited:
                visited.add(consumer)
                fresh.append(topology.computations[consumer])
    return visited


def _edges(topology: Topology, node: ComputationNode) -> Iterator[tuple[str, str, bool]]:
    for stream in (*node.produces, DEAD_LETTERS):
        for consumer in topology.consumers_of(stream):
            yield stream, consumer.computation.name, consumer.subscription.feedback
