"""What a query is, and what most of them share.

A query is a function from the streams to the stream of its answer. A value of the answer is one row of it, as an
object. Answers that can change retract rows: a *live* step emits its result again after every bundle that
changed it, and retracts the previous one, so at any time the rows that are not retracted are the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa

import millpond as mp

Row: TypeAlias = dict[str, Any]
"""A row of an answer or an event, by column."""

Streams: TypeAlias = Mapping[str, mp.DataflowStream]
"""The injected streams that a query asks for."""

TEN_SECONDS: Final = 10_000_000

LIVE: Final = mp.windows.WindowingStrategy(
    window_fn=mp.GlobalWindows(),
    trigger=mp.Repeatedly(mp.AfterCount(1)),
    accumulation="retracting",
    asked="bundle",
)
"""One window for all of time, whose result is emitted after each bundle that changes it, with a retraction of the previous one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One query.

    Attributes:
        name: its name in the benchmark, and the prefix of its steps.
        title: the question, in one line.
        operator: the part of Millpond that answers it.
        build: takes the streams and the name, declares the steps and returns the stream of the answer.
        schema: the columns of its Delta table; ``None`` keeps rows as JSON with their windows and panes.
    """

    name: str
    title: str
    operator: str
    columns: tuple[str, ...]
    inputs: tuple[str, ...]
    build: Callable[[Streams, str], mp.DataflowStream]
    schema: pa.Schema | None = None


def live(stream: mp.DataflowStream, of: Callable[[Row], Any] | None = None) -> mp.WindowedStream:
    """The stream, or a part of its values, grouped by key alone, with answers that follow every change."""
    return stream.window(
        LIVE.window_fn, trigger=LIVE.trigger, accumulation=LIVE.accumulation, asked=LIVE.asked, of=of
    )


def daily(stream: mp.DataflowStream) -> mp.WindowedStream:
    """The stream grouped by day: a provisional answer every ten seconds, and the final one at the end of the day."""
    return stream.window(
        mp.FixedWindows("1d"),
        trigger=mp.AfterWatermark(early=mp.AtPeriod(0, "10s", "wall")),
        accumulation="retracting",
    )


def everything(value: Any) -> str:
    """The single key of an answer about all events."""
    return "all"


def fields(*names: str) -> Callable[[Row], Row]:
    """An extractor that keeps only these fields of an event, so that state stays small."""

    def pick(event: Row) -> Row:
        return {name: event[name] for name in names}

    return pick
