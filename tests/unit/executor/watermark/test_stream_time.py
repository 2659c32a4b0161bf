"""The time of an injected stream and its members."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import observe_times
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.watermark.stream_time import InjectorTime
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US


def injector(saved: int = TIME_MIN_US, **options: object) -> InjectorTime:
    """Make an ordered stream at time 0 of the machine."""
    pipeline = EnginePipeline("p")
    pipeline.inject("s", key="k", at="t", **options).apply(Computation(), name="c")
    return InjectorTime(pipeline.check().injectors["s"], saved, 0)


def members(**options: object) -> InjectorTime:
    """Make a stream with the members a and b."""
    return injector(members=("a", "b"), member="host", **options)


def observe(time: InjectorTime, now: int = 0, **newest: int) -> None:
    at, names = np.array(list(newest.values())), list(newest)
    time.observe(observe_times(time.watch(0), at, names), now)


def test_missing_member_holds_the_watermark():
    time = members()

    observe(time, a=100)
    assert time.watermark == TIME_MIN_US
    observe(time, b=40)

    assert time.watermark == 40


def test_silent_member_holds_the_watermark():
    time = members()
    observe(time, a=100, b=40)

    observe(time, a=500)

    assert time.watermark == 40


def test_unexpected_member_does_not_affect_the_watermark():
    """Its records are processed all the same."""
    time = members()
    observe(time, a=100, b=40)

    observe(time, stranger=1)

    assert time.watermark == 40


@pytest.mark.parametrize("standing", ["idle", "gone"])
def test_idle_or_gone_member_does_not_hold_the_watermark(standing):
    time = members()
    observe(time, a=100, b=40)

    time.declare(standing, 0, "b")

    assert time.watermark == 100


def test_idle_member_holds_again_from_its_next_record():
    """The record itself may be late, because the watermark does not fall."""
    time = members()
    observe(time, a=100, b=40)
    time.declare("idle", 0, "b")

    observe(time, b=50)
    observe(time, a=300)
    assert time.watermark == 100
    observe(time, b=200)

    assert time.watermark == 200


def test_gone_member_counts_again_only_when_expected():
    """Its stragglers do not hold the watermark."""
    time = members()
    observe(time, a=100, b=40)
    time.declare("gone", 0, "b")

    observe(time, a=300, b=50)
    assert time.watermark == 300
    time.declare("expected", 0, "b")
    observe(time, a=900)

    assert time.watermark == 300


def test_member_is_idle_after_idle_after():
    time = members(idle_after="1s")
    observe(time, 0, a=100, b=40)
    observe(time, 999_999, a=200)
    assert time.watermark == 40

    observe(time, 1_000_000, a=300)

    assert time.watermark == 300
    assert not time.is_idle(1_000_000)


def test_idle_stream_keeps_its_watermark():
    time = injector(idle_after="10us")
    time.observe(observe_times(time.watch(0), np.array([70])), 0)

    time.settle(10)

    assert (time.watermark, time.is_idle(9), time.is_idle(10)) == (70, False, True)


def test_member_that_never_sent_anything_leaves_the_others_their_time():
    """Where all fall silent at once; otherwise event time would stand still for good."""
    time = members(idle_after="10us")
    observe(time, 5, a=100)
    assert time.watermark == TIME_MIN_US

    time.settle(15)

    assert (time.watermark, time.is_idle(15), time.may_lead) == (100, True, True)


def test_stream_with_records_in_processing_is_not_idle():
    """Otherwise a long superstep would make its own next input idle."""
    time = injector(idle_after="10us")

    time.hear(10)

    assert not time.is_idle(19)


def test_restarted_stream_keeps_its_watermark_until_all_members_report():
    time = injector(1_000, members=("a", "b"), member="host")

    observe(time, a=5_000)
    assert time.watermark == 1_000
    observe(time, b=1_500)

    assert time.watermark == 1_500


def test_advance_can_move_a_single_member():
    time = members()
    observe(time, a=100)

    time.advance(60, 0, "b")

    assert time.watermark == 60


def test_finish_does_not_wait_for_missing_members():
    time = members()

    time.finish(0)

    assert time.watermark == TIME_MAX_US
    assert not time.is_idle(10**12)


def test_declaration_of_an_unknown_member_is_refused():
    with pytest.raises(InvalidError, match="no such member"):
        members().declare("gone", 0, "c")


@pytest.mark.parametrize(
    "options",
    [
        {"members": "ab", "member": "host"},
        {"members": ("a", "a"), "member": "host"},
        {"members": ("a",)},
        {"member": "host"},
        {"members": ("",), "member": "host"},
        {"idle_after": 0},
        {"idle_after": "-1s"},
    ],
    ids=str,
)
def test_invalid_members_and_idle_times_are_refused(options):
    with pytest.raises(InvalidError):
        injector(**options)
