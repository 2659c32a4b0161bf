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
from millpond.executor.pipeline.nodes import SIGNALS, Subscription
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
    computations = dict(topology.computations)
    for name in names:
        step = computations[name]
        own, on_late = step.subscriptions, step.on_late
        if isinstance(on_late, str):
            # A signal is never too late: only the step knows if its window is still there.
            on_late = dict.fromkeys([subscription.stream for subscription in own], on_late)
        subscriptions = (*own, Subscription(stream=SIGNALS))
        computations[name] = replace(step, subscriptions=subscriptions, on_late=on_late)
    return replace(topology, injectors={**topology.injectors, SIGNALS: node}, computations=computations)


def listeners(topology: Topology, signal: str, step: str | None) -> list[str]:
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
    bounds = () if window is None else tuple(window)
    if window is not None and (list(map(type, bounds)) != [int, int] or bounds[0] >= bounds[1]):
        raise InvalidError("a window must be its start and end in microseconds", signal=signal, window=window)
    passed = [INSTANT_MIN_US, *watermarks, *(end - 1 for end in bounds[1:])]
    row = {
        "key": key,
        "at": min(max(passed), INSTANT_MAX_US),
        "id": id_,
        "signal": signal,
        "step": step or "",
        "window": "/".join(map(str, bounds)),
    }
    return pa.Table.from_pylist([row], _SCHEMA)


def read_signal(value: Mapping[str, Any], step: str) -> tuple[str, tuple[int, int] | None] | None:
    """Return a signal's name and the bounds of its window, from its record; ``None`` if it is for another step."""
    if value["step"] not in ("", step):
        return None
    start, _, end = value["window"].partition("/")
    return value["signal"], (int(start), int(end)) if end else None
