"""
Hypothesis strategies for windowed steps and their scripts.

A script is a list of moves: a bundle of elements of several keys, a watermark, an advance of the
wall clock, a restart. Times lie on whole seconds and one microsecond before and after them, where
windows, lateness and timers have their edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hypothesis import strategies as st

from millpond.testing.oracles.trigger import TriggerSpec
from millpond.testing.oracles.window import Arrival, WindowSpec

__all__ = [
    "MODES",
    "PERCENTILES",
    "Move",
    "arrivals",
    "endless_triggers",
    "scripts",
    "triggers",
    "window_fns",
    "window_specs",
]

SECOND_US: Final = 1_000_000
_SPAN_S: Final = 25

PERCENTILES: Final = (50, 90)
"""Percentiles whose watermarks triggers wait for, in addition to the low watermark."""

MODES: Final = ("discarding", "accumulating", "retracting", "clear_by_default", "accumulate_by_default")
"""How panes may relate."""


@dataclass(frozen=True, slots=True)
class Move:
    """
    One move: ``feed`` (arrivals), ``watermark`` (a time), ``mark`` (a percentile and a time), ``wall`` (a duration) or ``restart``.
    """

    kind: str
    argument: Any = None


_Specs: TypeAlias = st.SearchStrategy[TriggerSpec]


def window_fns(*, with_sessions: bool = True) -> st.SearchStrategy[tuple[Any, ...]]:
    """
    Window functions as the oracle describes them.
    """
    few = st.integers(1, 12)
    kinds: list[st.SearchStrategy[tuple[Any, ...]]] = [
        st.tuples(st.just("FixedWindows"), few, st.integers(0, 5)),
        st.tuples(st.just("SlidingWindows"), st.integers(4, 12), st.integers(3, 14)),
        st.just(("GlobalWindows",)),
        st.tuples(st.just("CustomTimestampingFixedWindowsWindowFn"), few),
    ]
    if with_sessions:
        # As often as all others together: merging has the most edge cases.
        kinds += [st.tuples(st.just("Sessions"), st.integers(1, 8))] * 3
    return st.one_of(kinds)


def _leaves() -> _Specs:
    few, domains = st.integers(1, 4), st.sampled_from(["event", "wall"])
    return st.one_of(
        st.tuples(st.just("AfterCount"), few),
        st.just(("Default",)),
        st.just(("AfterWatermark", {})),
        st.tuples(st.just("WatermarkPercentile"), st.sampled_from([*PERCENTILES, 100])),
        st.just(("Never",)),
        st.just(("ResultIsOdd",)),
        st.tuples(st.just("AfterBytes"), st.integers(1, 6)),
        st.tuples(st.just("UpTo"), st.integers(1, 60)),
        st.tuples(st.just("AfterProcessingTime"), st.integers(0, 5)),
        st.tuples(st.just("AfterDelay"), st.integers(0, 9), domains),
        st.tuples(st.just("AfterDelay"), st.integers(0, 9), domains, st.integers(1, 5)),
        st.tuples(st.just("AtPeriod"), st.integers(0, 5), st.integers(1, 9), domains),
    )


def _compositions(inner: _Specs) -> _Specs:
    named = st.fixed_dictionaries({}, optional={"early": inner, "late": inner})
    return st.one_of(
        st.tuples(st.just("Repeatedly"), inner),
        st.tuples(st.just("RepeatCount"), inner, st.integers(1, 3)),
        st.tuples(st.just("RepeatUntil"), inner, inner),
        st.tuples(st.just("AskingTo"), st.sampled_from(["'keep'", "'clear'"]), inner),
        st.tuples(st.just("AfterAny"), inner, inner),
        st.tuples(st.just("AfterAll"), inner, inner),
        st.tuples(st.just("AfterEach"), inner, inner),
        st.tuples(st.just("OrFinally"), inner, inner),
        st.tuples(st.just("AfterWatermark"), named),
        st.tuples(st.just("AfterWatermark"), st.fixed_dictionaries({"early": inner, "late": inner})),
    )


def triggers() -> _Specs:
    """
    Every kind of trigger, arbitrarily nested.
    """
    # Half of them repeat for ever; otherwise most scripts would end with the first pane.
    return st.one_of(_nested(), endless_triggers())


def endless_triggers() -> _Specs:
    """
    Triggers that never finish, so no element arrives after the last pane.
    """
    return _nested().map(lambda spec: ("Repeatedly", spec))


def _nested() -> _Specs:
    return st.recursive(_leaves(), _compositions, max_leaves=4)


def instants() -> st.SearchStrategy[int]:
    """
    Event times around whole seconds.
    """
    return st.builds(
        lambda seconds, offset: seconds * SECOND_US + offset,
        st.integers(0, _SPAN_S),
        st.sampled_from([0, 0, 0, -1, 1]),
    )


def window_specs() -> st.SearchStrategy[WindowSpec]:
    """
    Window function, trigger, mode, lateness, timestamp combiner and closing.
    """
    return st.builds(
        WindowSpec,
        window_fn=window_fns(),
        trigger=triggers(),
        mode=st.sampled_from([*MODES, "retracting"]),
        lateness=st.integers(0, 15).map(lambda seconds: seconds * SECOND_US),
        combiner=st.sampled_from(
            ["OUTPUT_AT_EOW", "OUTPUT_AT_EARLIEST", "OUTPUT_AT_LATEST", "OUTPUT_AT_EARLIEST_TRANSFORMED"]
        ),
        closing=st.sampled_from(["never", "if_non_empty", "always"]),
        empty_on_time=st.booleans(),
        asked=st.sampled_from(["element", "bundle"]),
        incremental=st.sampled_from([False, False, True]),
    )


def arrivals(size_max: int = 30) -> st.SearchStrategy[list[Arrival]]:
    """
    Elements of a few keys with unique values, in order of arrival.
    """
    times = st.lists(st.tuples(st.sampled_from("ab"), instants()), min_size=1, max_size=size_max)
    return times.map(lambda pairs: [Arrival(key, at, value) for value, (key, at) in enumerate(pairs)])


@st.composite
def scripts(draw: st.DrawFn, *, moves_max: int = 12, with_restarts: bool = True) -> list[Move]:
    """
    Moves in any order; watermarks rise, and values are unique.
    """
    kinds = ["feed", "feed", "watermark", "wall", "mark"] + (["restart"] if with_restarts else [])
    moves: list[Move] = []
    watermark, value = -1, 0
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=moves_max)):
        if kind == "feed" or not moves:
            elements = draw(arrivals(6))
            moves.append(
                Move("feed", tuple(element._replace(value=element.value + value) for element in elements))
            )
            value += len(elements)
        elif kind == "watermark":
            watermark = max(watermark, draw(instants()))
            moves.append(Move("watermark", watermark))
        elif kind == "mark":
            moves.append(Move("mark", (draw(st.sampled_from(PERCENTILES)), draw(instants()))))
        elif kind == "wall":
            moves.append(Move("wall", draw(st.integers(1, 8)) * SECOND_US))
        else:
            moves.append(Move("restart"))
    return moves
