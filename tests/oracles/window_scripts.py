"""Hypothesis strategies for windowed steps and their scripts.

A script is a list of moves: a bundle of elements of several keys, a watermark, an advance of the
wall clock, a restart. Times lie on whole seconds and one microsecond before and after them, where
windows, lateness and timers have their edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, TypeAlias
from zoneinfo import ZoneInfo

from hypothesis import strategies as st

from millpond.statestore.rows.row_format import IpcRowFormat, ParquetRowFormat, RowFormat
from tests.oracles.trigger import TriggerSpec
from tests.oracles.window import Arrival, WindowSpec

SECOND_US: Final = 1_000_000
_SPAN_S: Final = 25

_once: Final = lru_cache(maxsize=32)
"""Makes a strategy once for the same arguments: Hypothesis validates each new one, which takes longer than a draw."""

SIGNAL: Final = "go"
"""The signal that triggers wait for."""

PERCENTILES: Final = (50, 90)
"""Percentiles whose watermarks triggers wait for, in addition to the low watermark."""

MODES: Final = ("discarding", "accumulating", "retracting", "clear_by_default", "accumulate_by_default")
"""How panes may relate."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move.

    ``feed`` (arrivals), ``watermark`` (a time), ``mark`` (a percentile and a time), ``wall`` (a duration),
    ``signal`` (a key) or ``restart``.
    """

    kind: str
    argument: Any = None


@dataclass(frozen=True, slots=True)
class Scene:
    """The setting of a script's moves.

    Attributes:
        base: the event time at which the script begins, in microseconds.
        by_ingress: whether elements have the time of their arrival, so that only the clock moves.
    """

    base: int = 0
    by_ingress: bool = False


_MIDNIGHTS: Final = (
    (2024, 1, 1, "Europe/Berlin"),
    (2024, 3, 31, "Europe/Berlin"),
    (2024, 4, 1, "Europe/Berlin"),
    (2024, 11, 3, "America/New_York"),
    (2024, 11, 4, "America/New_York"),
)
"""Local midnights: a year and a week begin, a day has 23 hours, a month begins, a day has 25 hours, and ends."""


def _before(year: int, month: int, day: int, zone: str) -> int:
    """Return a time shortly before a midnight."""
    midnight = datetime(year, month, day, tzinfo=ZoneInfo(zone))
    return round(midnight.timestamp() - _SPAN_S // 2) * SECOND_US


@_once
def scenes() -> st.SearchStrategy[Scene]:
    """The first seconds of 1970, seconds around a midnight, or times of arrival."""
    midnights = st.sampled_from(_MIDNIGHTS).map(lambda midnight: Scene(base=_before(*midnight)))
    return st.one_of(st.just(Scene()), midnights, st.just(Scene(by_ingress=True)))


@_once
def row_formats() -> st.SearchStrategy[RowFormat]:
    """Encodings of row files: one in eight is Parquet, which takes a third of the time of a run."""
    return st.sampled_from([*[IpcRowFormat()] * 7, ParquetRowFormat()])


_Specs: TypeAlias = st.SearchStrategy[TriggerSpec]


@_once
def window_fns(
    *, with_sessions: bool = True, with_calendar: bool = False
) -> st.SearchStrategy[tuple[Any, ...]]:
    """Window functions as the oracle describes them."""
    few = st.integers(1, 12)
    kinds: list[st.SearchStrategy[tuple[Any, ...]]] = [
        st.tuples(st.just("FixedWindows"), few, st.integers(0, 5)),
        st.tuples(st.just("SlidingWindows"), st.integers(4, 12), st.integers(3, 14)),
        st.tuples(st.just("UnalignedFixedWindows"), few),
        st.just(("GlobalWindows",)),
        st.tuples(st.just("CustomTimestampingFixedWindowsWindowFn"), few),
    ]
    if with_calendar:
        units = st.sampled_from(["'days'", "'weeks'", "'months'", "'years'"])
        zones = st.sampled_from([f"'{zone}'" for *_, zone in _MIDNIGHTS])
        kinds += [st.tuples(st.just("CalendarWindows"), units, st.integers(1, 3), zones)] * 3
    if with_sessions:
        # Choose it as often as all others together: merging has the most edge cases.
        kinds += [st.tuples(st.just("Sessions"), st.integers(1, 8))] * 3
    return st.one_of(kinds)


@_once
def _leaves() -> _Specs:
    few, domains = st.integers(1, 4), st.sampled_from(["event", "wall"])
    return st.one_of(
        st.tuples(st.just("AfterCount"), few),
        st.just(("Default",)),
        st.just(("AfterWatermark", {})),
        st.tuples(st.just("WatermarkPercentile"), st.sampled_from([*PERCENTILES, 100])),
        st.just(("Never",)),
        st.just(("ResultIsOdd",)),
        st.just(("AfterSignal", f"'{SIGNAL}'")),
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


@_once
def triggers() -> _Specs:
    """Every kind of trigger, arbitrarily nested."""
    # Let half of them repeat indefinitely; otherwise most scripts would end with the first pane.
    return st.one_of(_nested(), endless_triggers())


@_once
def endless_triggers() -> _Specs:
    """Triggers that never finish, so no element arrives after the last pane."""
    return _nested().map(lambda spec: ("Repeatedly", spec))


@_once
def _nested() -> _Specs:
    return st.recursive(_leaves(), _compositions, max_leaves=4)


@_once
def instants() -> st.SearchStrategy[int]:
    """Event times around whole seconds."""
    return st.builds(
        lambda seconds, offset: seconds * SECOND_US + offset,
        st.integers(0, _SPAN_S),
        st.sampled_from([0, 0, 0, -1, 1]),
    )


@_once
def _shifts() -> st.SearchStrategy[tuple[int, int]]:
    """The shift of elements, and the horizon that holds the watermark for it; half of all steps have none."""
    few = st.integers(1, 9).map(lambda seconds: seconds * SECOND_US)
    forwards, back = st.tuples(few, st.just(0)), few.map(lambda by: (-by, by))
    unbounded = few.map(lambda by: (-by, 0))
    return st.one_of(st.just((0, 0)), st.just((0, 0)), st.just((0, 0)), forwards, back, unbounded)


@_once
def window_specs(scene: Scene | None = None) -> st.SearchStrategy[WindowSpec]:
    """Window function, trigger, mode, lateness, timestamp combiner and closing; with a scene also shifts."""
    specs = _unmoved_specs(with_calendar=scene is not None and bool(scene.base))
    if scene is None:
        return specs
    return st.builds(lambda spec, moved: replace(spec, shift=moved[0], horizon=moved[1]), specs, _shifts())


@_once
def _unmoved_specs(*, with_calendar: bool) -> st.SearchStrategy[WindowSpec]:
    return st.builds(
        WindowSpec,
        window_fn=window_fns(with_calendar=with_calendar),
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


@_once
def arrivals(size_max: int = 30) -> st.SearchStrategy[list[Arrival]]:
    """Elements of a few keys with unique values, in order of arrival."""
    times = st.lists(st.tuples(st.sampled_from("ab"), instants()), min_size=1, max_size=size_max)
    return times.map(lambda pairs: [Arrival(key, at, value) for value, (key, at) in enumerate(pairs)])


@st.composite
def scripts(
    draw: st.DrawFn, *, moves_max: int = 12, with_restarts: bool = True, scene: Scene | None = None
) -> list[Move]:
    """Moves in any order; watermarks rise, and values are unique."""
    setting = scene or Scene()
    kinds = ["feed", "feed", "watermark", "wall", "mark", "signal"]
    kinds += ["restart"] if with_restarts else []
    if setting.by_ingress:
        # A restart before any commit returns to the current watermark.
        kinds = ["feed", "wall", "signal"]
    moves: list[Move] = []
    watermark, value, base = -1, 0, setting.base
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=3, max_size=moves_max)):
        if kind == "feed" or not moves:
            elements = draw(arrivals(6))
            moves.append(
                Move("feed", tuple(Arrival(key, at + base, number + value) for key, at, number in elements))
            )
            value += len(elements)
        elif kind == "watermark":
            watermark = max(watermark, draw(instants()))
            moves.append(Move("watermark", watermark + base))
        elif kind == "mark":
            moves.append(Move("mark", (draw(st.sampled_from(PERCENTILES)), draw(instants()) + base)))
        elif kind == "wall":
            moves.append(Move("wall", draw(st.integers(1, 8)) * SECOND_US))
        elif kind == "signal":
            moves.append(Move("signal", draw(st.sampled_from("ab"))))
        else:
            moves.append(Move("restart"))
    return moves


@_once
def _cuts(size: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(1, size))


def cut(draw: st.DrawFn, moves: Sequence[Move]) -> list[Move]:
    """Return the same elements in the same order, with cuts between some of them."""
    pieces: list[Move] = []
    for move in moves:
        if move.kind != "feed":
            pieces.append(move)
            continue
        start = 0
        for end in [*sorted(draw(_cuts(len(move.argument)))), len(move.argument)]:
            if end > start:
                pieces.append(Move("feed", move.argument[start:end]))
            start = end
    return pieces


def together(moves: Sequence[Move]) -> list[Move]:
    """Return the same elements, with no cut between two moves of time."""
    joined: list[Move] = []
    for move in moves:
        if joined and move.kind == joined[-1].kind == "feed":
            joined[-1] = Move("feed", (*joined[-1].argument, *move.argument))
        else:
            joined.append(move)
    return joined
