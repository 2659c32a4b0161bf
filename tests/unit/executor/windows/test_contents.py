"""Triggers that look at what a window holds."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.executor.windows.window import WindowState
from tests.fixtures.panes import SeenPanes


class Above(mp.Trigger):
    """A trigger of a user: fires when the sum is above a bound, and notes what it saw."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.saw: list[Any] = []

    def on_element(self, context: mp.windows.TriggerContext, element: mp.windows.Element) -> None:
        """Look at the sum with the element in it."""
        total = context.peek_value()
        self.saw.append((element.value["n"], total))
        context.set("above", total > self.bound)

    def should_fire(self, context: mp.windows.TriggerContext) -> bool:
        """Whether the sum was above the bound."""
        return bool(context.get("above", False))

    def on_fire(self, context: mp.windows.TriggerContext) -> bool:
        """Finished after one firing."""
        return True


def shown(
    trigger: mp.Trigger, *numbers: int, combine: mp.CombineFn | None = None, **options: Any
) -> list[Any]:
    """The values of the panes of one window, whose elements come in one bundle."""
    pipeline, seen = mp.Pipeline("contents"), SeenPanes()
    rows = pipeline.inject("in", key="k", at="n", at_unit="us", watermark=mp.ManualWatermark())
    windows = rows.window(mp.FixedWindows(100), trigger=trigger, **options)
    windows.combine(combine or mp.Sum("n"), name="sums").apply(seen, name="seen")
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        run.inject("in", [{"k": "k", "n": number} for number in numbers])
        run.run_until_quiet()
    return seen.values


def test_a_trigger_sees_the_value_with_each_element_in_it() -> None:
    """In `on_element` the combined value has the element already, and only what has come since the last pane if that cleared."""
    above = Above(5)

    assert shown(mp.Repeatedly(above), 1, 2, 4, 3, 9) == [7, 12]
    assert above.saw == [(1, 1), (2, 3), (4, 7), (3, 3), (9, 12)]


@pytest.mark.parametrize(("asked", "panes"), [("element", [3, 5]), ("bundle", [])])
def test_a_result_is_looked_at_when_triggers_are_asked(asked: str, panes: list[int]) -> None:
    """A condition on the result is looked at after each element, or once for all that a bundle brings."""
    odd = mp.Repeatedly(mp.windows.ResultIs(lambda total: total % 2 == 1))

    assert shown(odd, 3, 5, asked=asked) == panes


def test_a_result_is_what_a_pane_would_show() -> None:
    """The value is that of any combiner, extracted: a mean, not its parts."""
    exact = mp.Repeatedly(mp.windows.ResultIs(lambda mean: mean == 2))

    assert shown(exact, 1, 3, combine=mp.Mean("n"), accumulation="accumulating") == [2]


def test_the_contents_of_merged_windows_are_those_of_the_result() -> None:
    """A context whose contents are gone, as those of the sources of a merge, refuses to be looked at."""
    window = mp.Window(0, 10)
    context = mp.windows.TriggerContext(WindowState(window=window), 0, 0, combine=mp.Count())
    merging = mp.windows.TriggerContext(
        WindowState(window=window), 0, 0, combine=mp.Count(), sources=(WindowState(window=window),)
    )

    assert context.peek_value() == context.child("0").peek_value() == merging.peek_value() == 0
    with pytest.raises(mp.InvalidError, match="cannot be read"):
        merging.sources[0].peek_value()


def test_a_condition_is_a_function() -> None:
    """Anything else is refused where the trigger is made."""
    with pytest.raises(mp.InvalidError, match="a condition is a function"):
        mp.windows.ResultIs(3)  # type: ignore[arg-type]
