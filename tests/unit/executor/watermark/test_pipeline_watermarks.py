"""Percentile watermarks of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import observe_times
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.time.watermark_policies import BoundedDisorder, IngressTime
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MIN_US
from millpond.testing.fixtures.determinism import ManualClock


class Halves(Computation):
    percentiles = (50, 90)


def keeper(positions: dict[str, int] | None = None) -> PipelineWatermarks:
    """Chain stream s → a → b, where b declares percentiles."""
    pipeline = EnginePipeline("p")
    first = pipeline.inject("s", key="k", at="t", watermark=BoundedDisorder("1ms")).apply(
        Computation(), name="a"
    )
    first.apply(Halves(), name="b")
    made = PipelineWatermarks(pipeline.check(), ManualClock(0))
    made.restore(positions or {})
    return made


def see(time: PipelineWatermarks, *at: int) -> None:
    """Commit records of s."""
    time.observe([observe_times(time.watch("s"), np.array(at))])
    time.take_effect()


def disordered(time: PipelineWatermarks) -> None:
    """Commit 100 records of which 30 are 40 late and 5 are 400 late; the newest is at 10,000."""
    see(time, 10_000)
    see(time, *[10_000] * 65, *[9_960] * 30, *[9_600] * 5)


def test_percentiles_are_ahead_of_the_low_watermark():
    """Each lags the newest record by the delay at its percentile."""
    time = keeper()

    disordered(time)

    assert time.input_watermark("a") == time.mark("a", 100) == 9_000
    assert (time.mark("a", 90), time.mark("a", 50)) == (9_960, 10_000)
    assert time.percentile_watermarks("b") == {90.0: 9_960, 50.0: 10_000}


def test_percentiles_equal_the_low_watermark_below_100_delays():
    time = keeper()
    see(time, 10_000)

    see(time, *[10_000] * 99)

    assert time.percentile_watermarks("b") == {90.0: 9_000, 50.0: 9_000}


def test_undeclared_percentile_is_the_low_watermark():
    """Waiting longer is always safe."""
    time = keeper()
    disordered(time)

    assert time.mark("b", 70) == 9_000


def test_undelivered_productions_bind_each_percentile_separately():
    """A percentile may ignore a share of the pending productions too."""
    time = keeper()
    disordered(time)
    waiting = ProductionSummary(
        stream="a", count=9, oldest_at=100, percentile_oldest_at={90.0: 100, 50.0: 9_970}
    )

    time.set_undelivered({"a": waiting})

    assert time.mark("b", 100) == 100
    assert time.percentile_watermarks("b") == {90.0: 100, 50.0: 9_970}


def test_holds_bind_each_percentile_separately():
    time = keeper()

    time.update_interval(Interval("a"), 1, 100, {90.0: 200, 50.0: 300})
    disordered(time)

    assert time.input_watermark("a") == 9_000
    assert (time.mark("b", 100), time.percentile_watermarks("b")) == (100, {90.0: 200, 50.0: 300})


def test_percentile_watermarks_are_ordered():
    """Reports may be inconsistent, but none falls behind the low watermark."""
    time = keeper()
    disordered(time)

    time.update_interval(Interval("a"), 1, 9_500, {90.0: 9_900, 50.0: 9_400})

    assert time.mark("b", 100) <= time.mark("b", 90) <= time.mark("b", 50)


def test_percentile_watermarks_never_fall():
    """Late records change only the distance to the newest record."""
    time = keeper()
    disordered(time)
    before = time.percentile_watermarks("b")

    see(time, *[9_100] * 500)

    assert all(time.percentile_watermarks("b")[each] >= at for each, at in before.items())


def test_percentile_watermarks_survive_a_restart():
    time = keeper()
    disordered(time)
    positions = time.positions()

    after = keeper(positions)

    assert after.percentile_watermarks("b") == time.percentile_watermarks("b") == {90.0: 9_960, 50.0: 10_000}
    assert after.input_watermark("b") == 9_000
    assert after.positions() == positions


def test_pipeline_without_percentiles_journals_none():
    """It must not pay for measuring delays either."""
    pipeline = EnginePipeline("p")
    pipeline.inject("s", key="k", at="t").apply(Computation(), name="a")
    time = PipelineWatermarks(pipeline.check(), ManualClock(0))
    time.restore({})

    assert len(time.positions()) == 2
    assert not time.watch("s").with_delays


def test_finished_input_is_finished_at_every_percentile():
    time = keeper()

    time.finish("s")

    assert set(time.percentile_watermarks("b").values()) == {time.input_watermark("b")}


def test_ingress_watermark_waits_for_stamped_records():
    """Uncommitted stamps hold the watermark, and a later stamp is never before it."""
    pipeline, clock = EnginePipeline("p"), ManualClock(1_000)
    pipeline.inject("s", key="k", at=IngressTime()).apply(Computation(), name="a")
    time = PipelineWatermarks(pipeline.check(), clock)
    time.restore({})
    stamp = time.watch("s").stamp_at
    clock.advance_ms(1)

    time.tick(["s"])
    assert not time.has_changed
    assert (stamp, time.input_watermark("a")) == (1_000, TIME_MIN_US)
    time.observe([observe_times(time.watch("s"), np.array([stamp]))])
    time.take_effect()
    assert time.input_watermark("a") == 1_000
    time.tick()
    assert not time.has_changed
    assert time.input_watermark("a") == 2_000
    clock.jump_ms(-2)
    time.tick()

    assert (time.watch("s").stamp_at, time.input_watermark("a")) == (2_000, 2_000)
    restored = PipelineWatermarks(pipeline.check(), clock)
    restored.restore(time.positions())
    assert restored.watch("s").stamp_at == 2_000


def test_changed_policy_keeps_watermark_and_declarations():
    """Later records count by the new policy."""
    time = keeper(keeper_at(5_000).positions())
    topology = time._topology
    injector = replace(topology.injectors["s"], watermark=BoundedDisorder("3ms"))
    time.declare("s", "gone")

    time.follow(replace(topology, injectors={"s": injector}))
    assert time.injector_watermark("s") == 5_000
    assert "s" in time.conditions().idle
    time.declare("s", "expected")
    see(time, 7_000)
    assert time.injector_watermark("s") == 5_000
    see(time, 10_000)

    assert (time.injector_watermark("s"), time.input_watermark("a")) == (7_000, 7_000)


def keeper_at(watermark: int) -> PipelineWatermarks:
    """Return a keeper whose stream has reached this watermark."""
    time = keeper()
    see(time, watermark + 1_000)
    return time
