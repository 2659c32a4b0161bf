"""Triggers that wait for the outside: an operator, another program, a calendar of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext
from millpond.executor.pipeline.checks import check_name

_GIVEN: Final = "given"


@dataclass(frozen=True)
class AfterSignal(Trigger):
    """Fires once, when a signal of this name comes for the window; wrap it in `Repeatedly` to fire again.

    ``run.signal(name, key, window)`` gives the signal, on either runner. It goes through a superstep and its
    fenced commit as records do, so it takes effect exactly once. A signal for a window without elements has
    nothing to show: it is counted as ``signals_missed`` of the step.

    Args:
        name: the signal's name: letters, digits and ``_ - .``.

    Raises:
        InvalidError: the name is malformed.

    Example:
        >>> AfterAny(AfterSignal("release"), AfterWatermark())
        AfterAny(AfterSignal(name='release'), AfterWatermark(early=None, late=None))
    """

    name: str

    def __post_init__(self) -> None:
        """Validate the name at construction."""
        check_name("signal", self.name, reserved=frozenset())

    @property
    def signals(self) -> frozenset[str]:
        """Its name."""
        return frozenset({self.name})

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Note a signal of its name."""
        if name == self.name:
            context.set(_GIVEN, value=True)

    def on_merge(self, context: TriggerContext) -> None:
        """The signal has come if it has for any of the merged windows."""
        if any(source.get(_GIVEN) for source in context.sources):
            context.set(_GIVEN, value=True)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the signal has come."""
        return bool(context.get(_GIVEN, False))

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.set(_GIVEN, value=False)
        return True
