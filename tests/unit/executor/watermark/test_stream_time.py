"""The time of one injected stream: members that are expected, silent, idle, gone."""

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
    """A stream in order, at time 0 of the machine."""
    pipeline = EnginePipeline("p")
    pipeline.inject("s", key="k", at="t", **options).apply(Computation(), name="c")
    return InjectorTime(pipeline.check().injectors["s"], saved, 0)


def members(**options: object) -> InjectorTime:
    """A stream with the members a and b."""
    return injector(members=("a", "b"), member="host", **options)


def observe(time: InjectorTime, now: int = 0, **newest: int) -> None:
    """Records of members, one each."""
    at, names = np.array(list(newest.values())), list(newest)
    time.observe(observe_times(time.watch(0), at, names), now)


def test_a_missing_member_holds_the_watermark():
    """Until every expected member has been heard of, nothing is known."""
    time = members()

    observe(time, a=100)
    assert time.watermark == TIME_MIN_US
    observe(time, b=40)

    assert time.watermark == 40


def test_a_silent_member_holds_the_watermark():
    """The slowest member decides."""
    time = members()
    observe(time, a=100, b=40)

    observe(time, a=500)

    assert time.watermark == 40


def test_a_stranger_moves_nothing():
    """Records of unexpected members are taken in without an effect on time."""
    time = members()
    observe(time, a=100, b=40)

    observe(time, stranger=1)

    assert time.watermark == 40


@pytest.mark.parametrize("standing", ["idle", "gone"])
def test_a_member_that_is_out_holds_no_longer(standing):
    """The others advance without it."""
    time = members()
    observe(time, a=100, b=40)

    time.declare(standing, 0, "b")

    assert time.watermark == 100


def test_an_idle_member_counts_again_with_its_next_record():
    """What it brings may be late; from then on it holds again, and the watermark does not fall."""
    time = members()
    observe(time, a=100, b=40)
    time.declare("idle", 0, "b")

    observe(time, b=50)
    observe(time, a=300)
    assert time.watermark == 100
    observe(time, b=200)

    assert time.watermark == 200


def test_a_member_that_is_gone_stays_gone():
    """Its stragglers hold no watermark back until it is expected again."""
    time = members()
    observe(time, a=100, b=40)
    time.declare("gone", 0, "b")

    observe(time, a=300, b=50)
    assert time.watermark == 300
    time.declare("expected", 0, "b")
    observe(time, a=900)

    assert time.watermark == 300


def test_silence_makes_a_member_idle():
    """After the time that was allowed, and not before."""
    time = members(idle_after="1s")
    observe(time, 0, a=100, b=40)
    observe(time, 999_999, a=200)
    assert time.watermark == 40

    observe(time, 1_000_000, a=300)

    assert time.watermark == 300
    assert not time.is_idle(1_000_000)


def test_when_no_member_is_left_time_stands_still():
    """A stream that is idle as a whole keeps its watermark, and says that it is idle."""
    time = injector(idle_after=10)
    time.observe(observe_times(time.watch(0), np.array([70])), 0)

    time.settle(10)

    assert (time.watermark, time.is_idle(9), time.is_idle(10)) == (70, False, True)


def test_records_on_their_way_are_no_silence():
    """A superstep that took long does not make its own next input idle."""
    time = injector(idle_after=10)

    time.hear(10)

    assert not time.is_idle(19)


def test_it_goes_on_from_the_saved_watermark():
    """After a restart no member can pull time back, and each must be heard of again."""
    time = injector(1_000, members=("a", "b"), member="host")

    observe(time, a=5_000)
    assert time.watermark == 1_000
    observe(time, b=1_500)

    assert time.watermark == 1_500


def test_promises_may_be_a_members():
    """A report without records moves the one member that it is about."""
    time = members()
    observe(time, a=100)

    time.advance(60, 0, "b")

    assert time.watermark == 60


def test_the_end_waits_for_no_member():
    """When the input has ended, missing members do not matter."""
    time = members()

    time.finish(0)

    assert time.watermark == TIME_MAX_US
    assert not time.is_idle(10**12)


def test_a_member_that_is_not_expected_is_refused():
    """A report about a misspelt member is an error."""
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
def test_what_cannot_work_is_refused_at_the_declaration(options):
    """Members without a way to tell them, or an idle time of nothing, are errors where they are written."""
    with pytest.raises(InvalidError):
        injector(**options)
