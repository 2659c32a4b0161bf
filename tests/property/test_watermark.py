"""Low watermarks over generated topologies, cycles included, against a slow oracle and a slow pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import observe_times
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.checks import check_topology
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.pipeline.topology import Topology
from millpond.executor.watermark.authority import WatermarkAuthority
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US
from millpond.testing.fixtures.determinism import ManualClock

INTERVALS = (("", "m"), ("m", None))
TIMES = st.integers(min_value=0, max_value=60)


@st.composite
def topologies(draw, *, with_feedback: bool = False) -> Topology:
    """Up to five computations; each consumes an injected stream and any productions, even its own.

    Computations outside cycles may have horizons: they produce below their input, and lag behind it.
    ``with_feedback`` allows declared feedback.
    """
    pipeline = EnginePipeline("p")
    injected = [f"s{i}" for i in range(draw(st.integers(1, 2)))]
    for stream in injected:
        pipeline.inject(stream, key="k", at="t")
    names = [f"c{i}" for i in range(draw(st.integers(1, 5)))]
    for position, name in enumerate(names):
        # Each consumes an earlier computation or an injected stream, so all are reachable; the rest is free.
        root = draw(st.sampled_from([*injected, *names[:position]]))
        others = draw(st.sets(st.sampled_from([*injected, *names]), max_size=3))
        subscribes = dict.fromkeys([root, *sorted(others)])
        pipeline.add(Computation(), name=name, subscribes=subscribes, produces=[name])
    topology = pipeline.check()
    if with_feedback:
        topology = _declare_feedback(draw, topology)
    nodes = dict(topology.computations)
    for name in names:
        lagging = Computation()
        lagging.late_data_horizon = draw(st.sampled_from([0, 0, "7us"]))
        changed = {**nodes, name: replace(nodes[name], computation=lagging)}
        try:
            check_topology(replace(topology, computations=changed))
        except InvalidError:
            continue
        nodes = changed
    return replace(topology, computations=nodes)


def _declare_feedback(draw: st.DrawFn, topology: Topology) -> Topology:
    """Return the same pipeline, with some of the possible streams declared a feedback."""
    pipeline = EnginePipeline("p")
    for stream in topology.injectors:
        pipeline.inject(stream, key="k", at="t")
    for name, node in topology.computations.items():
        streams = [subscription.stream for subscription in node.subscriptions]
        back = [stream for stream in streams if stream in after(topology, name)]
        pipeline.add(
            Computation(),
            name=name,
            subscribes=dict.fromkeys(streams),
            produces=[name],
            feedback=[stream for stream in back if draw(st.booleans())],
        )
    try:
        return pipeline.check()
    except InvalidError as refusal:
        assert "on feedbacks" in str(refusal)  # noqa: PT017 - any other refusal is a failure
        return topology


def after(topology: Topology, name: str) -> set[str]:
    """Return ``name`` and the computations downstream of it; each produces to its own name."""
    known = {name}
    while True:
        more = {
            consumer
            for consumer, node in topology.computations.items()
            if any(subscription.stream in known for subscription in node.subscriptions)
        }
        if more <= known:
            return known
        known |= more


class Oracle:
    """The same equations, solved by descending from the top to a fixpoint."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.injected = dict.fromkeys(topology.injectors, TIME_MIN_US)
        self.undelivered = {}
        self.holds = {name: {} for name in topology.computations}
        self.published = dict.fromkeys(topology.computations, TIME_MIN_US)

    def raw(self) -> dict[str, int]:
        inputs = dict.fromkeys(self.topology.computations, TIME_MAX_US)
        while True:
            lower = {name: self.input_of(name, inputs) for name in inputs}
            if lower == inputs:
                return inputs
            inputs = lower

    def input_of(self, name: str, inputs: dict[str, int]) -> int:
        bounds = []
        for subscription in self.topology.computations[name].subscriptions:
            stream = subscription.stream
            if stream in self.injected:
                bounds.append(self.injected[stream])
            else:
                bounds.append(self.undelivered.get(stream, TIME_MAX_US))
                if not (subscription.feedback and stream in after(self.topology, name)):
                    bounds += [self.output_of(p.name, inputs) for p in self.topology.producers_of(stream)]
        return min(bounds)

    def output_of(self, name: str, inputs: dict[str, int]) -> int:
        lag = self.topology.computations[name].horizon_us if abs(inputs[name]) < TIME_MAX_US else 0
        return min([inputs[name] - lag, *self.holds[name].values()])

    def publish(self) -> dict[str, int]:
        raw = self.raw()
        self.published = {name: max(at, raw[name]) for name, at in self.published.items()}
        return self.published


@given(st.data(), topologies(with_feedback=True))
def test_watermark_equals_a_slow_fixpoint_and_never_falls(data, topology):
    """Events may be unlawful."""
    authority, oracle = WatermarkAuthority(topology), Oracle(topology)
    assert TIME_MAX_US not in oracle.raw().values(), "nothing would hold a watermark before the first record"
    names = list(topology.computations)
    for _ in range(data.draw(st.integers(1, 25))):
        before = authority.input_watermarks()
        kind = data.draw(st.sampled_from(["injector", "interval", "undelivered"]))
        if kind == "injector":
            stream, at = data.draw(st.sampled_from(list(topology.injectors))), data.draw(TIMES)
            authority.update_injector(stream, at)
            oracle.injected[stream] = max(oracle.injected[stream], at)
        elif kind == "interval":
            name, bounds = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(INTERVALS))
            hold = data.draw(st.none() | TIMES)
            authority.update_interval(Interval(name, *bounds), 1, hold)
            oracle.holds[name][bounds] = TIME_MAX_US if hold is None else hold
        else:
            oracle.undelivered = data.draw(st.dictionaries(st.sampled_from(names), TIMES))
            authority.set_undelivered(oracle.undelivered)

        after = authority.input_watermarks()
        assert after == oracle.publish()
        for name in names:
            assert after[name] >= before[name]
            if after[name] > before[name]:
                assert after[name] <= oracle.raw()[name]


class SlowPipeline:
    """A pipeline of records without code: productions are drawn."""

    def __init__(self, data: st.DataObject, topology: Topology) -> None:
        self.data = data
        self.topology = topology
        self.authority = WatermarkAuthority(topology)
        self.undelivered: list[tuple[str, int]] = []
        self.timers: dict[str, list[tuple[int, int, str]]] = {name: [] for name in topology.computations}
        self.owed: dict[str, list[tuple[int, int, str]]] = {}
        self.budget = 60

    def superstep(self, injected: list[tuple[str, int]]) -> None:
        """Deliver everything, fire due timers, then report to the authority, as a commit does."""
        delivered, self.undelivered = [*injected, *self.undelivered], []
        watermarks = self.authority.input_watermarks()
        self.owed = {name: list(timers) for name, timers in self.timers.items()}
        for name, node in self.topology.computations.items():
            for timer in [t for t in self.timers[name] if t[0] <= watermarks[name]]:
                self.timers[name].remove(timer)
                self.process(name, timer[1], timer[1], timer[2])
            streams = {subscription.stream for subscription in node.subscriptions}
            for stream, at in delivered:
                if stream in streams:
                    assert at >= watermarks[name], "a record is late although its source was not"
                    where = self.data.draw(st.sampled_from(INTERVALS))[0]
                    self.process(name, at, at - node.horizon_us, where)
        self.report()

    def process(self, name: str, at: int, floor: int, where: str) -> None:
        if self.budget > 0 and self.data.draw(st.booleans()):
            self.budget -= 1
            # The key may still produce at its hold of the superstep's start, or keep the hold.
            oldest = min([floor, *(hold for _, hold, low in self.owed[name] if low == where)])
            later = self.data.draw(st.sampled_from([at, oldest])) + self.data.draw(st.integers(0, 9))
            if self.data.draw(st.booleans()):
                self.undelivered.append((name, later))
            else:
                self.timers[name].append((later + self.data.draw(st.integers(0, 9)), later, where))

    def report(self) -> None:
        oldest: dict[str, int] = {}
        for stream, at in self.undelivered:
            oldest[stream] = min(oldest.get(stream, at), at)
        self.authority.set_undelivered(oldest)
        for name, timers in self.timers.items():
            for low, high in INTERVALS:
                holds = [hold for _, hold, where in timers if where == low]
                self.authority.update_interval(Interval(name, low, high), 1, min(holds, default=None))


@given(st.data(), topologies())
def test_no_record_is_late_unless_its_source_was(data, topology):
    """No watermark passes a production, hold or future record."""
    pipeline = SlowPipeline(data, topology)
    watermarks = dict.fromkeys(topology.injectors, 0)
    for _ in range(data.draw(st.integers(1, 8))):
        injected = [
            (stream, watermarks[stream] + data.draw(st.integers(0, 20)))
            for stream in data.draw(st.lists(st.sampled_from(list(watermarks)), max_size=3))
        ]
        pipeline.superstep(injected)
        for stream in watermarks:
            watermarks[stream] += data.draw(st.integers(0, 10))
            pipeline.authority.update_injector(stream, watermarks[stream])


@given(st.data(), topologies(with_feedback=True))
def test_everything_drains_where_no_cycle_holds_itself(data, topology):
    """A timer must hold its own time, or an earlier time outside any cycle."""
    pipeline = SlowPipeline(data, topology)
    for name, node in topology.computations.items():
        at = data.draw(st.none() | TIMES)
        earlier = data.draw(st.integers(0, 9)) if not node.cycle else 0
        pipeline.timers[name] = [] if at is None else [(at, at - earlier, "")]
    pipeline.report()
    pipeline.budget = 0
    for stream in topology.injectors:
        pipeline.authority.update_injector(stream, TIME_MAX_US)

    for _ in range(len(topology.computations) + 1):
        pipeline.superstep([])

    assert not any(pipeline.timers.values())
    assert set(pipeline.authority.input_watermarks().values()) == {TIME_MAX_US}


class Asking(Computation):
    """A computation that requests percentile watermarks."""

    percentiles = (50, 90, 99)


PERCENTILES = (100.0, 99.0, 90.0, 50.0)


def asking(topology: Topology) -> Topology:
    """Return the same topology, with computations that request percentiles."""
    nodes = {name: replace(node, computation=Asking()) for name, node in topology.computations.items()}
    return replace(topology, computations=nodes)


def some_marks(data: st.DataObject, oldest: int) -> dict[float, int]:
    """Return the oldest times without a share of the keys, as tasks report them: never below the oldest."""
    ahead = sorted(data.draw(st.lists(st.integers(0, 30), min_size=3, max_size=3)))
    return {percentile: oldest + step for percentile, step in zip(PERCENTILES[1:], ahead, strict=True)}


@given(st.data(), topologies())
def test_percentiles_are_ordered_never_fall_and_survive_a_restart(data, topology):
    """Percentile 100 is the low watermark."""
    topology = asking(topology)
    clock = ManualClock(0)
    time, exact = PipelineWatermarks(topology, clock), WatermarkAuthority(topology)
    time.restore({})
    names, streams = list(topology.computations), list(topology.injectors)
    for _ in range(data.draw(st.integers(1, 12))):
        before = {name: [time.mark(name, percentile) for percentile in PERCENTILES] for name in names}
        kind = data.draw(st.sampled_from(["records", "interval", "undelivered", "advance", "restart"]))
        if kind == "records":
            stream, count = data.draw(st.sampled_from(streams)), data.draw(st.integers(1, 150))
            at = np.array(data.draw(st.lists(TIMES, min_size=1, max_size=4)) * count)
            time.observe([observe_times(time.watch(stream), at)])
            time.take_effect()
            exact.update_injector(stream, int(at.max()))
        elif kind == "advance":
            stream, moment = data.draw(st.sampled_from(streams)), data.draw(TIMES)
            time.advance(stream, moment)
            exact.update_injector(stream, moment)
        elif kind == "interval":
            interval = Interval(data.draw(st.sampled_from(names)), *data.draw(st.sampled_from(INTERVALS)))
            hold = data.draw(st.none() | TIMES)
            time.update_interval(interval, 1, hold, {} if hold is None else some_marks(data, hold))
            exact.update_interval(interval, 1, hold)
        elif kind == "undelivered":
            oldest = data.draw(st.dictionaries(st.sampled_from(names), TIMES, max_size=2))
            summaries = {
                stream: ProductionSummary(
                    stream=stream, count=1, oldest_at=at, percentile_oldest_at=some_marks(data, at)
                )
                for stream, at in oldest.items()
            }
            time.set_undelivered(summaries)
            exact.set_undelivered(
                {stream: at for stream, at in oldest.items() if topology.consumers_of(stream)}
            )
        else:
            # A restart reads pending work from the rows; here there is none.
            positions = time.positions()
            time, restored = PipelineWatermarks(topology, clock), exact.input_watermarks()
            time.restore(positions)
            exact = WatermarkAuthority(topology)
            exact.restore(restored)
            for stream in streams:
                exact.update_injector(stream, time.injector_watermark(stream))

        for name in names:
            marks = [time.mark(name, percentile) for percentile in PERCENTILES]
            assert marks == sorted(marks)
            assert all(now >= then for now, then in zip(marks, before[name], strict=True))
            assert marks[0] == exact.input_watermark(name)
