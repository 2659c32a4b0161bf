"""Signals from outside, for which windowed steps wait: records of a separate injected stream.

A signal travels like any other record: it has a key, a time and perhaps an id, is routed to the interval of
its key, and is consumed in the fenced commit that stores its effect. Its stream never ends, and holds no
watermark back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millpond.executor.inputs.extraction import InjectorNode
from millpond.executor.pipeline.nodes import SIGNALS, ComputationNode, Subscription
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.instants import INSTANT_MAX_US, INSTANT_MIN_US, TimeReading
from millpond.executor.time.watermark_policies import FollowingLogic, InjectorLogic
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros

SignalWindow: TypeAlias = Sequence[int] | None
"""The bounds of a window as in panes, in microseconds since 1970 UTC; ``None`` for all of a key's windows."""

_SCHEMA: Final = pa.schema(
    {
        "key": pa.string(),
        "at": pa.int64(),
        "id": pa.string(),
        "signal": pa.string(),
        "step": pa.string(),
        "window": pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class _HoldsNothing:
    """The policy of a stream that never holds a watermark back."""

    def start(self, saved: EventTimeMicros | None = None) -> InjectorLogic:  # noqa: ARG002 - wherever it was
        return FollowingLogic(TIME_MAX_US, None)


def with_signals(topology: Topology, names: Mapping[str, frozenset[str]]) -> Topology:
    """Return the topology with the stream of signals and subscriptions to it; ``names`` is by windowed step."""
    if not names:
        return topology
    node = InjectorNode(
        stream=SIGNALS,
        key="key",
        at="at",
        id="id",
        watermark=_HoldsNothing(),
        times=TimeReading.of("us", None, stream=SIGNALS),
        signals=dict(names),
    )
    computations = {
        name: _listening(computation) if name in names else computation
        for name, computation in topology.computations.items()
    }
    return replace(topology, injectors={**topology.injectors, SIGNALS: node}, computations=computations)


def _listening(node: ComputationNode) -> ComputationNode:
    own = [subscription.stream for subscription in node.subscriptions]
    # A signal is never too late: only the step knows if its window is still there.
    on_late = dict.fromkeys(own, node.on_late) if isinstance(node.on_late, str) else node.on_late
    return replace(node, subscriptions=(*node.subscriptions, Subscription(stream=SIGNALS)), on_late=on_late)


def listeners(topology: Topology, signal: str, step: str | None) -> list[str]:
    """Return the windowed steps that a signal is for."""
    node = topology.injectors.get(SIGNALS)
    known = {} if node is None else node.signals
    found = [name for name, names in known.items() if signal in names and step in (None, name)]
    if not found:
        raise InvalidError(
            "no windowed step waits for this signal",
            signal=signal,
            step=step,
            signals={name: sorted(names) for name, names in known.items()},
        )
    return found


def signal_rows(
    signal: str,
    key: str,
    window: SignalWindow,
    *,
    step: str | None,
    id_: str | None,
    watermarks: Iterable[EventTimeMicros],
) -> pa.Table:
    """Return the row that carries a signal to ``step``, or to all steps that wait for it.

    Its time is the end of its window, or now, by the input ``watermarks`` of the steps, if that has passed.
    """
    for name, value in (("key", key), ("id", id_)):
        if not isinstance(value, str) and (name == "key" or value is not None):
            raise InvalidError(f"a signal's {name} must be text", signal=signal, value=value)
    bounds = None if window is None else _bounds(signal, window)
    passed = [INSTANT_MIN_US, *watermarks, *([] if bounds is None else [bounds[1] - 1])]
    row = {
        "key": key,
        "at": min(max(passed), INSTANT_MAX_US),
        "id": id_,
        "signal": signal,
        "step": step or "",
        "window": "" if bounds is None else f"{bounds[0]}/{bounds[1]}",
    }
    return pa.Table.from_pylist([row], _SCHEMA)


def _bounds(signal: str, window: Sequence[int]) -> tuple[int, int]:
    bounds = tuple(window)
    is_valid = len(bounds) == 2 and all(type(bound) is int for bound in bounds)
    if not is_valid or bounds[0] >= bounds[1]:
        raise InvalidError("a window must be its start and end in microseconds", signal=signal, window=window)
    return bounds[0], bounds[1]


def read_signal(value: Mapping[str, Any], step: str) -> tuple[str, tuple[int, int] | None] | None:
    """Return a signal's name and the bounds of its window, from its record; ``None`` if it is for another step."""
    if value["step"] not in ("", step):
        return None
    start, _, end = value["window"].partition("/")
    return value["signal"], (int(start), int(end)) if end else None
