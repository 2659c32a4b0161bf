"""The time of a pipeline: the watermarks of its injectors and of all its computations.

The observations of a superstep take effect only once it is committed: until then records of that superstep may still
be lost with it, and no watermark may have passed them (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from millpond.executor.inputs.positions import percentile_watermark_app_id
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import EXACT, PercentileTimes
from millpond.executor.time.observations import DEFAULT_MEMBER, InputObservation, Watch
from millpond.executor.time.watermark_policies import BoundedDisorder, IngressTime, Monotone, WatermarkPolicy
from millpond.executor.watermark.authority import Conditions, WatermarkAuthority
from millpond.executor.watermark.stream_time import InjectorTime, MemberStatus
from millpond.statestore.app_ids import AppId
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros, Sequencer


class PipelineWatermarks:
    """Injectors and the watermark authority of one pipeline, restorable from its positions.

    Attributes:
        skew_limits: how far streams may be ahead of the slowest computation, in microseconds.
        drains: all input has ended, and event time passes by steps.
        follows_clock: event time passes with the clock while all streams are idle.
        newest_at: the event time of the newest outside record so far.
        has_changed: time alone has moved a watermark, or a member was declared, and no commit records it yet.
        ended_before: the streams that had ended when the run began.
    """

    def __init__(self, topology: Topology, clock: Clock) -> None:
        self._clock = clock
        self._authority = WatermarkAuthority(topology)
        self._percentiles = {percentile: WatermarkAuthority(topology) for percentile in topology.percentiles}
        # One authority for each percentile: the same equations over other facts.
        self._layers = [(EXACT, self._authority), *self._percentiles.items()]
        self._app_ids = {
            (kind, name, percentile): percentile_watermark_app_id(topology.name, kind, name, percentile)
            for kind, names in (("injector", topology.injectors), ("computation", topology.computations))
            for name in names
            for percentile, _ in self._layers
        }
        self._injectors: dict[str, InjectorTime] = {}
        self.has_changed: bool = False
        self.drains: bool = False
        self.follows_clock: bool = True
        self.ended_before: frozenset[str] = frozenset()
        self._journaled: dict[str, EventTimeMicros] = {}
        self.newest_at: EventTimeMicros = EventTimeMicros(TIME_MIN_US)
        self._imposed: tuple[Conditions, Mapping[str, int]] | None = None
        self._set_topology(topology)

    def _set_topology(self, topology: Topology) -> None:
        self._topology = topology
        nodes = topology.injectors
        self._behind_us = {
            name: _behind_us(node.watermark) for name, node in nodes.items() if not node.members
        }
        self.skew_limits: dict[str, int] = {
            name: node.skew_limit_us for name, node in nodes.items() if node.skew_limit_us
        }
        self._may_be_idle = any(node.idle_after_us for node in nodes.values())
        self._has_ingress = any(isinstance(node.at, IngressTime) for node in nodes.values())

    def restore(self, positions: Mapping[str, int], former: PipelineWatermarks | None = None) -> None:
        """Continue from the watermarks that the last commits journaled.

        Injectors that are unchanged since ``former``, the time before an update, keep their observations.
        """
        app_ids = self._app_ids
        now = self._clock.monotonic_us()
        for name, injector in self._topology.injectors.items():
            marks = {
                percentile: EventTimeMicros(positions.get(app_ids["injector", name, percentile], TIME_MIN_US))
                for percentile, _ in self._layers
            }
            standings = {}
            for member in injector.members or (DEFAULT_MEMBER,):
                app_id = AppId.MEMBER_STATUS.of(self._topology.name, name, member)
                if app_id in positions:
                    standings[member] = positions[app_id]
            self._injectors[name] = InjectorTime(injector, marks.pop(EXACT), now, marks, standings)
        for percentile, authority in self._layers:
            journaled = {}
            for name in self._topology.computations:
                app_id = app_ids["computation", name, percentile]
                if app_id in positions:
                    journaled[name] = EventTimeMicros(positions[app_id])
            authority.restore(journaled)
            if percentile == EXACT:
                self._journaled = journaled
        known = positions.get(AppId.LAST_EVENT.of(self._topology.name), TIME_MIN_US)
        # Before that was recorded, the watermarks are the only trace of the newest record.
        known_marks = (one.watermark for one in self._injectors.values() if one.watermark != TIME_MAX_US)
        self.newest_at = EventTimeMicros(max(known, *known_marks, TIME_MIN_US))
        # Records of a stream that an earlier run ended are refused.
        self.ended_before = self.ended
        if former is not None:
            self._continue_from(former)
        self._settle()

    def follow(self, topology: Topology) -> None:
        """Continue with a topology that differs only in the watermark policies of streams without a record so far."""
        now, former = self._clock.monotonic_us(), self._topology
        for name, node in topology.injectors.items():
            if node != former.injectors[name]:
                known = self._injectors[name]
                marks = {percentile: known.mark(percentile) for percentile in self._percentiles}
                self._injectors[name] = InjectorTime(node, known.watermark, now, marks, known.standings())
        self._set_topology(topology)

    def _continue_from(self, former: PipelineWatermarks) -> None:
        # A stream that this run has ended takes late records until the run's end.
        self.ended_before -= former._injectors.keys() - former.ended_before
        if self._percentiles.keys() != former._percentiles.keys():
            return
        nodes, former_nodes = self._topology.injectors, former._topology.injectors
        self._injectors |= {
            name: one for name, one in former._injectors.items() if nodes.get(name) == former_nodes[name]
        }
        self.has_changed = former.has_changed

    def positions(self) -> dict[str, int]:
        positions: dict[str, int] = {}
        if self._topology.sets_timers or self._topology.has_feedback:
            positions[AppId.LAST_EVENT.of(self._topology.name)] = self.newest_at
        for name, injector in self._injectors.items():
            for member, version in injector.standings().items():
                positions[AppId.MEMBER_STATUS.of(self._topology.name, name, member)] = version
        for percentile, authority in self._layers:
            for name, injector in self._injectors.items():
                positions[self._app_ids["injector", name, percentile]] = injector.mark(percentile)
            if self._imposed is not None:
                # A replay journals the watermarks of the original, otherwise the next superstep would differ.
                positions |= {app_id: at for app_id, at in self._imposed[1].items() if app_id in positions}
            for name, at in authority.input_watermarks().items():
                # The mark of a percentile is never behind the mark of a greater one.
                mark = at if percentile == EXACT else self.mark(name, percentile)
                positions[self._app_ids["computation", name, percentile]] = mark
        return positions

    def conditions(self) -> Conditions:
        watermarks: dict[str, dict[float, EventTimeMicros]] = {}
        for percentile, authority in self._layers:
            for stream in self._injectors:
                watermarks.setdefault(stream, {})[percentile] = authority.injected[stream]
        idle = tuple(sorted(self._authority.idle))
        return Conditions(
            wall_time=self._clock.now_us(), watermarks=watermarks, idle=idle, drains=self.drains
        )

    def impose(self, conditions: Conditions, journaled: Mapping[str, int]) -> None:
        """Give the next superstep of a replay the conditions of the superstep that it repeats.

        From now on neither the records nor the clock move a stream's watermark. ``journaled`` are the watermarks in
        the original's commit, by application id.
        """
        self._imposed, self.drains = (conditions, journaled), conditions.drains
        for stream, marks in conditions.watermarks.items():
            if marks.get(EXACT) == TIME_MAX_US and stream in self._injectors:
                self._injectors[stream].finish(self._clock.monotonic_us())
        self._settle()

    def mark(self, computation: str, percentile: float) -> EventTimeMicros:
        """Return the computation's input watermark at a percentile, or the low watermark for an undeclared one.

        It never falls, and is never behind the mark of a greater percentile.
        """
        mark = self._authority.input_watermark(computation)
        if percentile in self._percentiles:
            for declared, authority in self._percentiles.items():
                if declared >= percentile:
                    mark = max(mark, authority.input_watermark(computation))
        return mark

    def percentile_watermarks(self, computation: str) -> PercentileTimes:
        if not self._percentiles:
            return {}
        return {percentile: self.mark(computation, percentile) for percentile in self._percentiles}

    def input_watermarks(self) -> dict[str, EventTimeMicros]:
        return self._authority.input_watermarks()

    def input_watermark(self, computation: str) -> EventTimeMicros:
        return self._authority.input_watermark(computation)

    def settled(self, computation: str, injected: Mapping[str, EventTimeMicros]) -> EventTimeMicros | None:
        return self._authority.settled(computation, injected)

    def foresee(self, inputs: Iterable[InputObservation]) -> dict[str, EventTimeMicros]:
        """Return the watermarks that streams will have once these inputs take effect.

        Only a stream that follows its newest record, and has no members, is foreseen.
        """
        marks: dict[str, EventTimeMicros] = {}
        for seen in inputs:
            behind_us = self._behind_us.get(seen.stream)
            if behind_us is not None and seen.times is not None:
                at = EventTimeMicros(seen.times.newest_at - behind_us)
                marks[seen.stream] = max(at, marks.get(seen.stream, at))
        return marks

    def low_watermark(self) -> EventTimeMicros:
        return min(self._authority.output_watermarks().values(), default=TIME_MIN_US)

    def behind_us(self, stream: str) -> int:
        """Return how far the stream's latest late record was behind the watermark in this run; 0 if none was."""
        return self._injectors[stream].behind_us

    def injector_watermark(self, stream: str) -> EventTimeMicros:
        return self._injectors[stream].watermark

    @property
    def ended(self) -> frozenset[str]:
        ended = []
        for name, injector in self._injectors.items():
            if injector.watermark == TIME_MAX_US and not self._topology.injectors[name].signals:
                ended.append(name)
        return frozenset(ended)

    def last_event(self, computation: str) -> EventTimeMicros | None:
        """Return the time of the newest outside record, once all input of the computation or the pipeline has ended."""
        least = min((one.watermark for one in self._injectors.values()), default=TIME_MIN_US)
        has_ended = self.drains or TIME_MAX_US in (least, self._authority.input_watermark(computation))
        return self.newest_at if has_ended else None

    def streams_ahead(self) -> frozenset[str]:
        if not self.skew_limits:
            return frozenset()
        slowest = min(self._authority.input_watermarks().values(), default=TIME_MAX_US)
        return frozenset(
            name
            for name, limit in self.skew_limits.items()
            if self._injectors[name].watermark - slowest > limit
        )

    def watch(self, stream: str) -> Watch:
        now = self._clock.now_us()
        watch = self._injectors[stream].watch(now, with_delays=bool(self._percentiles))
        if self._imposed is None or watch.stamp_at is None:
            return watch
        return replace(watch, stamp_at=self._imposed[0].stamps.get(stream, watch.stamp_at))

    def observe(self, inputs: Iterable[InputObservation]) -> None:
        """Pass the observations of a superstep to the injectors; see `take_effect`."""
        now = self._clock.monotonic_us()
        for seen in inputs:
            self._injectors[seen.stream].observe(seen, now)
            newest_at = seen.newest_at if seen.times is None else seen.times.newest_at
            if newest_at is not None and not self._topology.injectors[seen.stream].signals:
                self.newest_at = max(self.newest_at, newest_at)

    def promise(self, stream: str, watermark: EventTimeMicros) -> None:
        """Raise an injector's watermark once the superstep is committed; see `take_effect`."""
        self._injectors[stream].advance(watermark, self._clock.monotonic_us())

    def take_effect(self) -> None:
        """Publish the observations, now that they are committed."""
        imposed = None if self._imposed is None else self._imposed[0].watermarks
        for stream, injector in self._injectors.items():
            for percentile, authority in self._layers:
                if imposed is None:
                    at = injector.mark(percentile)
                else:
                    at = EventTimeMicros(imposed.get(stream, {}).get(percentile, TIME_MIN_US))
                authority.update_injector(stream, at)

    def record_commit(self) -> None:
        """Record that a commit has journaled `positions`; call it before `take_effect`."""
        self._journaled = self._authority.input_watermarks()
        self.has_changed = False

    def former_watermark(self, computation: str) -> EventTimeMicros:
        """Return the computation's input low watermark in the last committed superstep, of this run or before."""
        return self._journaled.get(computation, EventTimeMicros(TIME_MIN_US))

    def tick(self, heard: Iterable[str] = ()) -> None:
        """Leave out streams and members that have been silent for too long.

        ``heard`` are streams with records in the current superstep, which are therefore not silent.
        """
        # Arrival time passes with the wall's, except for records that are on their way with their stamp. A new
        # watermark alone is no work; a timer that it makes due is.
        if self._has_ingress:
            silent = [one for name, one in self._injectors.items() if one.is_ingress and name not in heard]
            for injector in silent:
                injector.advance(EventTimeMicros(self._clock.now_us()), self._clock.monotonic_us())
            if silent:
                self.take_effect()
        if not self._may_be_idle:
            return
        for stream in heard:
            self._injectors[stream].hear(self._clock.monotonic_us())
        before = self._authority.input_watermarks()
        self._settle()
        self.has_changed |= self._authority.input_watermarks() != before
        # Like arrival time, which passes with the clock: a new watermark alone is no work.
        if self.follows_clock and self._imposed is None:
            self._pass_silence()

    def _pass_silence(self) -> None:
        """Let event time pass with the clock if all streams are idle: the one that was heard last leads the others."""
        idle = self._authority.idle
        active = (name for name, one in self._injectors.items() if one.watermark != TIME_MAX_US)
        # A stream that waits for slower ones is not silent, and its records are older than the clock says.
        may_lead = idle - self.streams_ahead()
        leaders = [one for name, one in self._injectors.items() if name in may_lead and one.may_lead]
        if not leaders or not idle.issuperset(active):
            return
        leader = max(leaders, key=lambda one: (one.heard_us, -one.watermark))
        leader.pass_silence(self._clock.monotonic_us())
        for one in leaders:
            # Otherwise time would wait for the slowest of them after a restart.
            one.watermark = max(one.watermark, leader.watermark)
        for _, authority in self._layers:
            authority.set_idle(idle - {leader.stream})
        self.take_effect()

    def advance(
        self,
        stream: str,
        watermark: EventTimeMicros,
        member: str | None = None,
        percentile: float = EXACT,
    ) -> None:
        self._injectors[stream].advance(watermark, self._clock.monotonic_us(), member, percentile)
        self._settle()

    def hold_back(self, computation: str, at: EventTimeMicros | None) -> None:
        """Hold an input watermark back at every percentile, or end that; see `WatermarkAuthority.hold_back`."""
        for _, authority in self._layers:
            authority.hold_back(computation, at)

    def declare(self, stream: str, status: MemberStatus, member: str | None = None) -> None:
        self._injectors[stream].declare(status, self._clock.monotonic_us(), member)
        self.has_changed = True
        self._settle()

    def finish(self, stream: str) -> None:
        self._injectors[stream].finish(self._clock.monotonic_us())
        self._settle()

    def _settle(self) -> None:
        now = self._clock.monotonic_us()
        for injector in self._injectors.values():
            injector.settle(now)
        idle: Iterable[str] = [name for name, one in self._injectors.items() if one.is_idle(now)]
        if self._imposed is not None:
            idle = self._imposed[0].idle
        for _, authority in self._layers:
            authority.set_idle(idle)
        self.take_effect()

    def update_interval(
        self,
        interval: Interval,
        sequencer: Sequencer,
        hold: EventTimeMicros | None,
        percentile_watermarks: PercentileTimes,
    ) -> None:
        """Replace an interval's oldest owed time, and by percentile the oldest without a share of its rows."""
        for percentile, authority in self._layers:
            authority.update_interval(interval, sequencer, percentile_watermarks.get(percentile, hold))

    def set_undelivered(self, summaries: Mapping[str, ProductionSummary]) -> None:
        for percentile, authority in self._layers:
            oldest = {}
            for stream, summary in summaries.items():
                if stream in self._topology.consumers:
                    oldest[stream] = summary.percentile_oldest_at.get(percentile, summary.oldest_at)
            authority.set_undelivered(oldest)


def _behind_us(policy: WatermarkPolicy) -> int | None:
    """Return a watermark's constant distance behind the newest record, or ``None`` if it has none."""
    if isinstance(policy, Monotone):
        return 0
    return policy.bound_us if isinstance(policy, BoundedDisorder) else None
