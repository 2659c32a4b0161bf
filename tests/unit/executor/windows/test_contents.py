"""Triggers that look at the contents of a window."""

from __future__ import annotations

from typing import Any

import pytest

import millpond as mp
from millpond.executor.windows.window import WindowState
from tests.fixtures.panes import SeenPanes


class Above(mp.Trigger):
    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.saw: list[Any] = []

    def on_element(self, context: mp.windows.TriggerContext, element: mp.windows.Element) -> None:
        total = context.peek_value()
        self.saw.append((element.value["n"], total))
        context.set("above", total > self.bound)

    def should_fire(self, context: mp.windows.TriggerContext) -> bool:
        return bool(context.get("above", False))

    def on_fire(self, context: mp.windows.TriggerContext) -> bool:
        return True


def shown(
    trigger: mp.Trigger, *numbers: int, combine: mp.CombineFn | None = None, **options: Any
) -> list[Any]:
    pipeline, seen = mp.Pipeline("contents"), SeenPanes()
    rows = pipeline.inject("in", key="k", at="n", at_unit="us", watermark=mp.ManualWatermark())
    windows = rows.window(mp.FixedWindows("100us"), trigger=trigger, **options)
    windows.combine(combine or mp.Sum("n"), name="sums").apply(seen, name="seen")
    with mp.LocalRunner(mp.Store.in_memory(), progress=False).start(pipeline, stepping=True) as run:
        run.inject("in", [{"k": "k", "n": number} for number in numbers])
        run.run_until_quiet()
    return seen.values


def test_peek_value_includes_the_current_element() -> None:
    """After a pane that clears, only later elements count."""
    above = Above(5)

    assert shown(mp.Repeatedly(above), 1, 2, 4, 3, 9) == [7, 12]
    assert above.saw == [(1, 1), (2, 3), (4, 7), (3, 3), (9, 12)]


@pytest.mark.parametrize(("asked", "panes"), [("element", [3, 5]), ("bundle", [])])
def test_result_condition_is_evaluated_when_triggers_are_asked(asked: str, panes: list[int]) -> None:
    odd = mp.Repeatedly(mp.windows.ResultIs(lambda total: total % 2 == 1))

    assert shown(odd, 3, 5, asked=asked) == panes


def test_result_condition_sees_the_extracted_value() -> None:
    """A mean's accumulator is a sum and a count; the condition sees their quotient."""
    exact = mp.Repeatedly(mp.windows.ResultIs(lambda mean: mean == 2))

    assert shown(exact, 1, 3, combine=mp.Mean("n"), accumulation="accumulating") == [2]


def test_contents_of_a_merge_can_be_read_from_its_result_only() -> None:
    """The contents of the sources have already moved into the result."""
    window = mp.Window(0, 10)
    context = mp.windows.TriggerContext(WindowState(window=window), 0, 0, combine=mp.Count())
    merging = mp.windows.TriggerContext(
        WindowState(window=window), 0, 0, combine=mp.Count(), sources=(WindowState(window=window),)
    )

    assert context.peek_value() == context.child("0").peek_value() == merging.peek_value() == 0
    with pytest.raises(mp.InvalidError, match="cannot be read"):
        merging.sources[0].peek_value()


def test_condition_must_be_a_function() -> None:
    with pytest.raises(mp.InvalidError, match="a condition is a function"):
        mp.windows.ResultIs(3)  # type: ignore[arg-type]
