"""Weak productions: delivered before the checkpoint that would make them durable (MillWheel §6.1.3).

A computation with ``productions="weak"`` delivers its productions within the superstep that made them: its
streams are *fused* with their consumers. The consumers' effects are part of the same commit, so the store
loses and repeats nothing. In exchange, consumers' code may see records that are not durable yet.

`fusion` decides which streams are fused.

A fused production that is stored anyway is *addressed*: its stream names the consumer that it still waits for.
``visits@cities`` waits only for the computation ``cities``, which was too slow to receive it within its
superstep; ``visits@`` waits for sinks only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ProductionMode: TypeAlias = Literal["strong", "weak"]
"""When a production is delivered: once its checkpoint is durable, or before."""

_MARK: Final = "@"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeakStreams:
    """How a computation's productions are delivered within a superstep.

    Attributes:
        fused: the streams whose productions reach their consumers before the commit.
        kept: the fused streams whose productions are also written to the producer's rows, for a sink
            or for a consumer in another task.
    """

    fused: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


STRONG: Final = WeakStreams()
"""Every production waits for its checkpoint."""


def addressed(stream: str, consumer: str = "") -> str:
    """The stream under which a fused production is kept for one computation, or for sinks only.

    Example:
        >>> addressed("visits", "cities")
        'visits@cities'
    """
    return f"{stream}{_MARK}{consumer}"


def is_addressed(stream: str) -> bool:
    """Whether a stream holds fused productions that are stored for one consumer or for sinks."""
    return _MARK in stream
