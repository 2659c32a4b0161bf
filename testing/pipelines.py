"""
Hypothesis strategies for whole pipelines and for what happens to them.

A `Case` is a pipeline and a script: batches of outside records, supersteps without input, and
hands of the wall clock. Every runner and the model can play it. Event times are unique within
a case, so that no runner's order of arrival can matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from millpond.executor.injector import BoundedDisorder
from millpond.executor.pipeline import Pipeline
from millpond.testing.computations import SECOND_US, ZOO

__all__ = ["Case", "Step", "cases"]

START_US = 1_700_000_000 * SECOND_US
"""Event time around which generated records lie."""


@dataclass(frozen=True, slots=True)
class Node:
    """
    One computation of a generated pipeline, by its place in the zoo.
    """

    kind: int
    sources: tuple[int, ...]
    field_key: bool
    weak: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """
    What happens next: rows on an injected stream (or none), after the wall clock has moved.
    """

    stream: str | None
    rows: tuple[dict[str, Any], ...]
    wall_us: int


@dataclass(frozen=True, slots=True)
class Case:
    """
    A pipeline and its script.

    Attributes:
        injectors: bounds on disorder in seconds, one an injected stream.
        nodes: the computations; each subscribes to streams of injectors and of earlier nodes.
        back_edge: whether the first node also consumes the last one's stream: a cycle.
        steps: the script.
    """

    injectors: tuple[int, ...]
    nodes: tuple[Node, ...]
    back_edge: bool
    steps: tuple[Step, ...]

    @property
    def sunk(self) -> tuple[str, ...]:
        """
        The streams that flow into sinks: most of them, for weak productions need no row without one.
        """
        return tuple(f"s{number}" for number, node in enumerate(self.nodes) if (node.kind + number) % 3)

    def pipeline(self, name: str = "case", *, weak: bool = True) -> Pipeline:
        """
        The pipeline; streams are ``in0``, ``in1``, …, and ``s0``, ``s1``, … by computation.

        Args:
            name: its name.
            weak: whether weak productions are weak; without, all are strong.
        """
        pipeline = Pipeline(name)
        streams = []
        for number, bound in enumerate(self.injectors):
            pipeline.inject(
                f"in{number}", key="k", at="at", id="id", watermark=BoundedDisorder(bound * SECOND_US)
            )
            streams.append(f"in{number}")
        for number, node in enumerate(self.nodes):
            sources = {streams[source % len(streams)] for source in node.sources}
            if self.back_edge and number == 0 and len(self.nodes) > 1:
                sources.add(f"s{len(self.nodes) - 1}")
            key = "k" if node.field_key else None
            pipeline.add(
                ZOO[node.kind]((f"s{number}",)),
                name=f"c{number}",
                subscribes=dict.fromkeys(sorted(sources), key),
                produces=(f"s{number}",),
                retries=0,
                productions="weak" if weak and node.weak else "strong",
            )
            streams.append(f"s{number}")
        return pipeline


@st.composite
def cases(draw: st.DrawFn, *, steps_max: int = 4, rows_max: int = 12) -> Case:
    """
    Small pipelines of one to four computations, with late, repeated and unreadable records.
    """
    injectors = tuple(draw(st.lists(st.integers(0, 20), min_size=1, max_size=2)))
    node = st.builds(
        Node,
        kind=st.integers(0, len(ZOO) - 1),
        sources=st.tuples(st.integers(0, 5), st.integers(0, 5)),
        field_key=st.booleans(),
        weak=st.booleans(),
    )
    nodes = tuple(draw(st.lists(node, min_size=1, max_size=4)))
    # `Forward` in a cycle of forwards would go round for ever; a window or a counter lets it end.
    back_edge = draw(st.booleans()) and any(ZOO[one.kind].__name__ in _DAMPING for one in nodes[:1])
    times = draw(
        st.lists(
            st.integers(0, 60_000), min_size=steps_max * rows_max, max_size=steps_max * rows_max, unique=True
        )
    )
    steps = []
    for number in range(draw(st.integers(1, steps_max))):
        own_times = times[number * rows_max : (number + 1) * rows_max]
        steps.append(draw(_step(len(injectors), own_times)))
    return Case(injectors=injectors, nodes=nodes, back_edge=back_edge, steps=tuple(steps))


_DAMPING = frozenset({"Count", "Faulty", "Alarm", "Batch"})


@st.composite
def _step(draw: st.DrawFn, injectors: int, times: list[int]) -> Step:
    wall_us = draw(st.integers(0, 8)) * SECOND_US
    if draw(st.integers(0, 4)) == 0:
        return Step(stream=None, rows=(), wall_us=wall_us)
    rows = [
        {
            "k": draw(st.sampled_from(["a", "b", "c", "é", "z\U0001f30a", None])),
            "at": None if draw(st.integers(0, 15)) == 0 else START_US + at * 1_000,
            "id": f"{at}",
            "n": draw(st.integers(0, 30)),
        }
        for at in times[: draw(st.integers(1, len(times)))]
    ]
    repeated = draw(st.lists(st.sampled_from(rows), max_size=3))
    return Step(stream=f"in{draw(st.integers(0, injectors - 1))}", rows=(*rows, *repeated), wall_us=wall_us)
