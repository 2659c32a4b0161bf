"""Watermark triggers: a window emits its contents when its input is believed to be complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.dataflow.triggers.repeat_triggers import Repeatedly
from millpond.dataflow.triggers.trigger import Trigger
from millpond.dataflow.triggers.trigger_context import TriggerContext, TriggerTimer
from millpond.dataflow.windows.element import Element
from millpond.executor.event_time.clocks import EXACT
from millpond.executor.event_time.delay_sketch import check_percentile

_EARLY: Final = "early"
_LATE: Final = "late"
_IS_LATE: Final = "is_late"


def _await_end(context: TriggerContext, percentile: float = EXACT) -> None:
    if context.watermark_at(percentile) < context.window.end:
        context.set_timer(context.window.end, percentile=percentile)


def _has_ended(context: TriggerContext, percentile: float = EXACT) -> bool:
    return context.watermark_at(percentile) >= context.window.end


class _AtEnd(Trigger):
    """Fires when a watermark has passed the window's end."""

    @property
    def _mark(self) -> float:
        """The percentile of the watermark to wait for."""
        raise NotImplementedError

    def on_arm(self, context: TriggerContext) -> None:
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - any element
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - any elements
        """Set a timer at the window's end."""
        _await_end(context, self._mark)

    def on_merge(self, context: TriggerContext) -> None:
        """Set a timer at the merged window's end."""
        _await_end(context, self._mark)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the watermark has passed the window's end."""
        return _has_ended(context, self._mark)


@dataclass(frozen=True)
class Default(_AtEnd):
    """Fires when the watermark passes the window's end, then again for each late element."""

    @property
    def _mark(self) -> float:
        return EXACT

    @property
    def waits_for_end(self) -> bool:
        """Nothing but the watermark makes it fire."""
        return type(self) is Default

    def on_fire(self, context: TriggerContext) -> bool:
        """Never finished: late elements may follow."""
        context.delete_timer()
        return False


@dataclass(frozen=True)
class WatermarkPercentile(_AtEnd):
    """Fires once, when a percentile watermark passes the window's end.

    A percentile watermark is the event time up to which a share of the input is estimated to have
    arrived. Below 100 the pane is early, and elements that arrive after it are not late: put several
    in an `AfterEach` to emit at increasing levels of completeness.

    Args:
        percentile: above 0 and at most 100, which is the low watermark itself.

    Raises:
        InvalidError: a percentile out of bounds.

    Example:
        >>> AfterEach(WatermarkPercentile(90), Default())
        AfterEach(WatermarkPercentile(percentile=90), Default())
    """

    percentile: float = 100

    def __post_init__(self) -> None:
        """Validate the percentile at construction."""
        check_percentile(self.percentile)

    @property
    def _mark(self) -> float:
        return float(self.percentile)

    @property
    def waits_for_end(self) -> bool:
        """Nothing but its watermark makes it fire."""
        return type(self) is WatermarkPercentile

    @property
    def percentiles(self) -> frozenset[float]:
        """The percentile it waits for, unless that is 100."""
        return frozenset({self._mark} - {EXACT})

    def on_fire(self, context: TriggerContext) -> bool:
        """Finished after one firing."""
        context.delete_timer(percentile=self._mark)
        return True


@dataclass(frozen=True)
class AfterWatermark(Trigger):
    """Fires when the watermark passes the window's end, optionally also before (early) and after (late).

    The early and late triggers restart after each of their firings. Without ``late`` the trigger
    finishes with the on-time pane, and later elements are dropped.

    Args:
        early: when to emit panes before the window's end.
        late: when to emit panes with late elements.

    Example:
        >>> trigger = AfterWatermark(early=AfterProcessingTime("1m"), late=AfterCount(1))
    """

    early: Trigger | None = None
    late: Trigger | None = None

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """The early and late triggers that were given, each repeated."""
        given = {_EARLY: self.early, _LATE: self.late}
        return {name: Repeatedly(trigger) for name, trigger in given.items() if trigger is not None}

    @property
    def waits_for_end(self) -> bool:
        """Without an early trigger nothing makes it fire before the watermark."""
        return type(self) is AfterWatermark and self.early is None

    def on_arm(self, context: TriggerContext) -> None:
        """Set a timer at the window's end, and arm the early trigger."""
        _await_end(context)
        if early := self.children.get(_EARLY):
            early.on_arm(context.child(_EARLY))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """Notify the active trigger, early or late."""
        name = self._active(context)
        if child := self.children.get(name):
            child.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """Notify the active trigger, early or late."""
        name = self._active(context)
        if child := self.children.get(name):
            child.on_elements(context.child(name), elements)

    def on_signal(self, context: TriggerContext, name: str) -> None:
        """Notify the active trigger, early or late."""
        active = _LATE if context.get(_IS_LATE) else _EARLY
        if child := self.children.get(active):
            child.on_signal(context.child(active), name)

    def _active(self, context: TriggerContext) -> str:
        if context.get(_IS_LATE):
            return _LATE
        _await_end(context)
        return _EARLY

    def on_merge(self, context: TriggerContext) -> None:
        """Merge the active triggers; the merged window is late if all its sources were.

        An on-time pane is still due for the others, at the merged window's end.
        """
        if all(source.get(_IS_LATE) for source in context.sources):
            context.set(_IS_LATE, value=True)
            name = _LATE
        else:
            name = _EARLY
            _await_end(context)
        if child := self.children.get(name):
            child.on_merge(context.child(name))

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """Deliver timers of the active trigger only: early timers mean nothing after the end."""
        active = _LATE if context.get(_IS_LATE) else _EARLY
        if timer.path == context.path or timer.path.startswith(f"{context.path}{active}/"):
            Trigger.on_child_timer(self, context, timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """Whether the watermark has passed the end or, else, the active trigger would fire."""
        if context.get(_IS_LATE):
            late = self.children.get(_LATE)
            return late is None or late.should_fire(context.child(_LATE))
        early = self.children.get(_EARLY)
        return _has_ended(context) or (early is not None and early.should_fire(context.child(_EARLY)))

    def on_fire(self, context: TriggerContext) -> bool:
        """Fire the active trigger or, at the end, switch to late; finished there without a late trigger."""
        children = self.children
        if context.get(_IS_LATE):
            return _LATE not in children or children[_LATE].fire(context.child(_LATE))
        if not _has_ended(context):
            children[_EARLY].fire(context.child(_EARLY))
            return False
        if _EARLY in children:
            children[_EARLY].reset(context.child(_EARLY))
        context.delete_timer()
        context.set(_IS_LATE, value=True)
        return self.late is None

    @property
    def label(self) -> str:
        """``AfterWatermark``; the early and late triggers have labels of their own."""
        return "AfterWatermark"
