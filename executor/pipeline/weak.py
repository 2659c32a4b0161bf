"""
Weak productions: delivered before the checkpoint that would make them durable (MillWheel §6.1.3).

A computation that says ``productions="weak"`` hands its productions to their consumers within the
superstep that made them: its streams are *fused* with their consumers. What the consumers make of
them is part of the same commit, so in the store nothing is lost and nothing counts twice. What is
given up is that consumers' code only ever sees records that are durable.

Which streams are fused is decided by `fusion`.

A production that is kept all the same is *addressed*: the stream it is kept under says who still
waits for it. ``visits@cities`` waits for the computation ``cities`` only, which was too slow to get
it within its superstep; ``visits@`` waits for no computation, but for sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["STRONG", "ProductionMode", "WeakStreams", "addressed", "is_addressed"]

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
