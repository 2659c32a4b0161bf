"""
Triggers on the watermark: a window shows its contents when its input is believed to be in.
"""

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

__all__ = ["AfterWatermark", "Default", "WatermarkPercentile"]

_EARLY: Final = "early"
_LATE: Final = "late"
_IS_LATE: Final = "is_late"


def _await_end(context: TriggerContext, percentile: float = EXACT) -> None:
    if context.watermark_at(percentile) < context.window.end:
        context.set_timer(context.window.end, percentile=percentile)


def _has_ended(context: TriggerContext, percentile: float = EXACT) -> bool:
    return context.watermark_at(percentile) >= context.window.end


class _AtEnd(Trigger):
    """
    Fires when a watermark has passed the window's end.
    """

    @property
    def _mark(self) -> float:
        """
        The percentile of the watermark that is meant.
        """
        raise NotImplementedError

    def on_arm(self, context: TriggerContext) -> None:
        """
        Wait for the end.
        """
        _await_end(context, self._mark)

    def on_element(self, context: TriggerContext, element: Element) -> None:  # noqa: ARG002 - whatever it is
        """
        Wait for the end.
        """
        _await_end(context, self._mark)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:  # noqa: ARG002 - however many
        """
        Wait for the end.
        """
        _await_end(context, self._mark)

    def on_merge(self, context: TriggerContext) -> None:
        """
        Wait for the end of the merged window.
        """
        _await_end(context, self._mark)

    def should_fire(self, context: TriggerContext) -> bool:
        """
        Whether the watermark has passed the end.
        """
        return _has_ended(context, self._mark)


@dataclass(frozen=True)
class Default(_AtEnd):
    """
    Fires when the watermark passes the window's end, then once for every bundle of late elements.
    """

    @property
    def _mark(self) -> float:
        return EXACT

    def on_fire(self, context: TriggerContext) -> bool:
        """
        There may be late elements to come.
        """
        context.delete_timer()
        return False


@dataclass(frozen=True)
class WatermarkPercentile(_AtEnd):
    """
    Fires once, when the watermark of a share of the input passes the window's end.

    At a percentile below 100 its pane is early, and elements that come after it are not late:
    put it before others in an `AfterEach` to show tiers of completeness.

    Args:
        percentile: above 0 and not above 100, which is the low watermark itself.

    Raises:
        InvalidError: a percentile out of bounds.
    """

    percentile: float = 100

    def __post_init__(self) -> None:
        """
        Refuse what cannot be answered while the caller is still near.
        """
        check_percentile(self.percentile)

    @property
    def _mark(self) -> float:
        return float(self.percentile)

    @property
    def percentiles(self) -> frozenset[float]:
        """
        The one that it waits for, unless that is the low watermark itself.
        """
        return frozenset({self._mark} - {EXACT})

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Once is enough.
        """
        context.delete_timer(percentile=self._mark)
        return True


@dataclass(frozen=True)
class AfterWatermark(Trigger):
    """
    Fires when the watermark passes the window's end; before it as ``early`` says, after it as ``late`` says.

    Both start over after each of their firings. Without ``late`` the window is done with its
    on-time pane, and what comes later is dropped.

    Args:
        early: when to show what is there before the window's end.
        late: when to show late elements.
    """

    early: Trigger | None = None
    late: Trigger | None = None

    @cached_property
    def children(self) -> Mapping[str, Trigger]:
        """
        What goes before and after the end.
        """
        given = {_EARLY: self.early, _LATE: self.late}
        return {name: Repeatedly(trigger) for name, trigger in given.items() if trigger is not None}

    def on_arm(self, context: TriggerContext) -> None:
        """
        Wait for the end.
        """
        _await_end(context)
        if early := self.children.get(_EARLY):
            early.on_arm(context.child(_EARLY))

    def on_element(self, context: TriggerContext, element: Element) -> None:
        """
        Tell the one of the two whose turn it is.
        """
        name = self._whose_turn(context)
        if child := self.children.get(name):
            child.on_element(context.child(name), element)

    def on_elements(self, context: TriggerContext, elements: Sequence[Element]) -> None:
        """
        Tell the one of the two whose turn it is.
        """
        name = self._whose_turn(context)
        if child := self.children.get(name):
            child.on_elements(context.child(name), elements)

    def _whose_turn(self, context: TriggerContext) -> str:
        if context.get(_IS_LATE):
            return _LATE
        _await_end(context)
        return _EARLY

    def on_merge(self, context: TriggerContext) -> None:
        """
        Late as soon as one of the merged windows was; their counts go on.
        """
        if any(source.get(_IS_LATE) for source in context.sources):
            context.set(_IS_LATE, value=True)
            name = _LATE
        else:
            name = _EARLY
            _await_end(context)
        if child := self.children.get(name):
            child.on_merge(context.child(name))

    def on_child_timer(self, context: TriggerContext, timer: TriggerTimer) -> None:
        """
        Timers of the early trigger mean nothing after the end.
        """
        turn = _LATE if context.get(_IS_LATE) else _EARLY
        if timer.path == context.path or timer.path.startswith(f"{context.path}{turn}/"):
            Trigger.on_child_timer(self, context, timer)

    def should_fire(self, context: TriggerContext) -> bool:
        """
        As the watermark, or the one whose turn it is, says.
        """
        if context.get(_IS_LATE):
            late = self.children.get(_LATE)
            return late is None or late.should_fire(context.child(_LATE))
        early = self.children.get(_EARLY)
        return _has_ended(context) or (early is not None and early.should_fire(context.child(_EARLY)))

    def on_fire(self, context: TriggerContext) -> bool:
        """
        Finished with the on-time pane if there is no late trigger.
        """
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

    def reset(self, context: TriggerContext) -> None:
        """
        Start over, and wait for the end if it is still to come.
        """
        Trigger.reset(self, context)
        _await_end(context)

    @property
    def label(self) -> str:
        """
        What panes call it.
        """
        return "AfterWatermark"
