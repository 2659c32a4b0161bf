"""
A guest: a computation that updates of a running pipeline bring and take away, next to what the workload declares.
"""

from __future__ import annotations

from typing import Final

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.record import Record
from millpond.executor.computation.timer import Timer
from millpond.executor.pipeline.pipeline import EnginePipeline

__all__ = ["add_guest"]

_NAME: Final = "guest"
_LATER_US: Final = 1_000_000


class _Guest(Computation):
    """
    Counts what comes and sets timers, which wait for it while it is away.
    """

    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)
        context.set_timer(record.at + _LATER_US, tag="later")

    def process_timer(self, context: Context, timer: Timer) -> None:  # noqa: ARG002 - the tag tells nothing
        context.state.set(context.state.get(0) + 1)


def add_guest(pipeline: EnginePipeline, *, is_here: bool) -> None:
    """
    Let the guest read a pipeline's first stream, or leave its rows where they are.
    """
    if is_here:
        stream = next(iter(pipeline._injectors))  # noqa: SLF001 - the workload declares them in its own way
        pipeline.stream(stream).apply(_Guest(), name=_NAME)
    else:
        pipeline._retire |= {_NAME}  # noqa: SLF001 - as the workload would say it in its own declaration
