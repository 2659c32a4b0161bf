"""Panes and their envelopes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from millpond.executor.inputs.keys import PaneKey
from millpond.executor.windows.pane import Pane, Timing, WindowedValue
from millpond.executor.windows.window import TimestampCombiner, Window, combined
from millpond.statestore.errors import InvalidError


def _pane(**fields: Any) -> Pane:
    given = {"index": 1, "nonspeculative_index": 0, "timing": Timing.LATE, "is_last": True} | fields
    return Pane(**given)


def test_envelope_survives_a_round_trip() -> None:
    shown = WindowedValue(value={"a": [1]}, window=Window(-5, 5), at=4, pane=_pane(trigger="Default()"))
    envelope = json.loads(json.dumps(shown.to_json()))

    assert WindowedValue.is_envelope(envelope)
    assert WindowedValue.from_json(envelope) == shown


def test_only_an_object_with_the_four_fields_is_an_envelope() -> None:
    assert not any(map(WindowedValue.is_envelope, [5, {}, {"value": 1, "window": [], "at": 1}]))


def test_retraction_repeats_its_pane_with_the_new_timing() -> None:
    """The timing comes from the pane that replaces the retracted one."""
    first = _pane(index=0, nonspeculative_index=-1, timing=Timing.EARLY, is_last=True)
    shown = WindowedValue(value=7, window=Window(0, 5), at=4, pane=first)
    back = shown.retraction(_pane(produced_at=9))

    assert (back.value, back.window, back.at) == (7, Window(0, 5), 4)
    assert (back.pane.index, back.pane.is_first, back.pane.nonspeculative_index) == (0, True, -1)
    assert (back.pane.is_retraction, back.pane.timing, back.pane.is_last) == (True, Timing.LATE, False)
    assert back.pane.produced_at == 9


def test_pane_key_reads_values_inside_envelopes_and_outside() -> None:
    shown = WindowedValue(value={"team": "red"}, window=Window(0, 5), at=4, pane=_pane())

    assert PaneKey("team")(shown.to_json()) == PaneKey("team")({"team": "red"}) == "red"
    assert PaneKey(lambda value: value["team"].upper())(shown.to_json()) == "RED"
    assert PaneKey.of(None, "step") is None
    with pytest.raises(InvalidError):
        PaneKey("user")(shown.to_json())


@pytest.mark.parametrize(
    ("combiner", "expected"), [(TimestampCombiner.EARLIEST, 3), (TimestampCombiner.LATEST, 5)]
)
def test_combined_time_is_the_earliest_or_latest_present(combiner: TimestampCombiner, expected: int) -> None:
    assert combined(combiner, 3, 5) == combined(combiner, 5, 3) == expected
    assert combined(combiner, None, 3) == combined(combiner, 3, None) == 3
    assert combined(combiner, None, None) is None
