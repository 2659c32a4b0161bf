"""The time of a pipeline: the watermarks of its injectors and of all its computations.

What a superstep observes takes effect only once it is committed: until then records of that
superstep may still be lost with it, and no watermark may have passed them (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from millpond.executor.inputs.positions import percentile_watermark_app_id
from millpond.executor.interval.bundle import ProductionSummary
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import EXACT, PercentileTimes
from millpond.executor.time.observations import DEFAULT_MEMBER, InputObservation, Watch
from millpond.executor.time.watermark_policies import BoundedDisorder, Monotone, WatermarkPolicy
from millpond.executor.watermark.authority import Conditions, WatermarkAuthority
from millpond.executor.watermark.stream_time import InjectorTime, MemberStatus
from millpond.statestore.app_ids import AppId
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, Clock, EventTimeMicros, Sequencer


class PipelineWatermarks:
    """Injectors and the watermark authority of one pipeline, restorable from its positions."""

    def __init__(self, topology: Topology, clock: Clock) -> None:
        self._topology = topology
        self._clock = clock
        self._authority = WatermarkAuthority(topology)
        self._percentiles = {percentile: WatermarkAuthority(topology) for percentile in topology.percentiles}
        self._injectors: dict[str, InjectorTime] = {}
        self._has_changed = False
        self._journaled: dict[str, EventTimeMicros] = {}
        self._ended_before: frozenset[str] = frozenset()
        self._imposed: tuple[Conditions, Mapping[str, int]] | None = None

    def restore(self, positions: Mapping[str, int], former: PipelineWatermarks | None = None) -> None:
        """Go on from the watermarks that the last commits journaled.

        Args:
            positions: the transactions of the table.
            former: the time of the pipeline before it was changed in this process, all of which is committed:
                injectors that are as they were go on with what they have seen.
        """
        pipeline = self._topology.name
        for name, injector in self._topology.injectors.items():
            saved = EventTimeMicros(
                positions.get(percentile_watermark_app_id(pipeline, "injector", name), TIME_MIN_US)
            )
            percentile_watermarks = {
                percentile: EventTimeMicros(
                    positions.get(
                        percentile_watermark_app_id(pipeline, "injector", name, percentile), TIME_MIN_US
                    )
                )
                for percentile in self._percentiles
            }
            app_ids = {
                member: AppId.MEMBER_STATUS.of(pipeline, name, member)
                for member in injector.members or (DEFAULT_MEMBER,)
            }
            standings = {
                member: positions[app_id] for member, app_id in app_ids.items() if app_id in positions
            }
            now = self._clock.monotonic_us()
            self._injectors[name] = InjectorTime(injector, saved, now, percentile_watermarks, standings)
        for percentile, authority in self._layers():
            app_ids = {
                name: percentile_watermark_app_id(pipeline, "computation", name, percentile)
                for name in self._topology.computations
            }
            journaled = {
                name: EventTimeMicros(positions[app_id])
                for name, app_id in app_ids.items()
                if app_id in positions
            }
            authority.restore(journaled)
            if percentile == EXACT:
                self._journaled = journaled
        self._ended_before = self.ended
        if former is not None:
            self._go_on_from(former)
        self._settle()

    def follow(self, topology: Topology) -> None:
        """Go on with a topology that differs only in how streams without a record so far make their watermarks.

        Args:
            topology: the checked pipeline.
        """
        now, former = self._clock.monotonic_us(), self._topology
        for name, node in topology.injectors.items():
            if node != former.injectors[name]:
                known = self._injectors[name]
                marks = {percentile: known.mark(percentile) for percentile in self._percentiles}
                self._injectors[name] = InjectorTime(node, known.watermark, now, marks, known.standings())
        self._topology = topology

    def _go_on_from(self, former: PipelineWatermarks) -> None:
        # What this run has ended takes late records until its end.
        self._ended_before -= former._injectors.keys() - former._ended_before
        if self._percentiles.keys() != former._percentiles.keys():
            return
        nodes, former_nodes = self._topology.injectors, former._topology.injectors
        self._injectors |= {
            name: one for name, one in former._injectors.items() if nodes.get(name) == former_nodes[name]
        }
        self._has_changed = former._has_changed

    def _layers(self) -> list[tuple[float, WatermarkAuthority]]:
        """One authority for each percentile: the same equations over other facts."""
        return [(EXACT, self._authority), *self._percentiles.items()]

    def positions(self) -> dict[str, int]:
        """What `restore` needs, by application id."""
        pipeline = self._topology.name
        positions: dict[str, int] = {
            AppId.MEMBER_STATUS.of(pipeline, name, member): version
            for name, injector in self._injectors.items()
            for member, version in injector.standings().items()
        }
        for percentile, _ in self._layers():
            for name, injector in self._injectors.items():
                positions[percentile_watermark_app_id(pipeline, "injector", name, percentile)] = (
                    injector.mark(percentile)
                )
            if self._imposed is not None:
                positions |= {app_id: at for app_id, at in self._imposed[1].items() if app_id in positions}
            for name in self._topology.computations:
                positions[percentile_watermark_app_id(pipeline, "computation", name, percentile)] = self.mark(
                    name, percentile
                )
        return positions

    def conditions(self) -> Conditions:
        """What a superstep that is planned now meets."""
        watermarks = {
            stream: {
                percentile: authority.injector_watermark(stream) for percentile, authority in self._layers()
            }
            for stream in self._injectors
        }
        idle = tuple(sorted(self._authority.idle))
        return Conditions(wall_time=self._clock.now_us(), watermarks=watermarks, idle=idle)

    def impose(self, conditions: Conditions, journaled: Mapping[str, int]) -> None:
        """Let the next superstep of a replay meet what the superstep met that it repeats.

        From now on neither the records nor the clock move a stream's watermark.

        Args:
            conditions: what it met; nothing is known of other streams.
            journaled: the watermarks that its commit journaled, by application id.
        """
        self._imposed = conditions, journaled
        for stream, marks in conditions.watermarks.items():
            if marks.get(EXACT) == TIME_MAX_US and stream in self._injectors:
                self._injectors[stream].finish(self._clock.monotonic_us())
        self._settle()

    def mark(self, computation: str, percentile: float) -> EventTimeMicros:
        """The computation's input watermark at a percentile; an undeclared one falls back to the low watermark.

        It never falls, and never lies behind one of a greater percentile.
        """
        layers = [authority for declared, authority in self._percentiles.items() if declared >= percentile]
        wanted = layers if percentile in self._percentiles else []
        return max(authority.input_watermark(computation) for authority in (self._authority, *wanted))

    def percentile_watermarks(self, computation: str) -> PercentileTimes:
        """All percentile watermarks of the computation's input that the pipeline keeps."""
        return {percentile: self.mark(computation, percentile) for percentile in self._percentiles}

    def input_watermark(self, computation: str) -> EventTimeMicros:
        """The computation's input low watermark."""
        return self._authority.input_watermark(computation)

    def settled(self, computation: str, injected: Mapping[str, EventTimeMicros]) -> EventTimeMicros | None:
        """What a computation's input watermark will be at least, once its streams have these watermarks.

        Returns:
            ``None`` where it is not known, or not wanted: its records come in no order.
        """
        sorts = self._topology.computations[computation].time_sorted
        return self._authority.settled(computation, injected) if sorts and injected else None

    def foresee(self, inputs: Iterable[InputObservation]) -> dict[str, EventTimeMicros]:
        """The watermarks that streams will have once `observe` and `take_effect` are told of these inputs.

        Only a stream that follows its newest record, and has no members, is foreseen.
        """
        marks: dict[str, EventTimeMicros] = {}
        for seen in inputs:
            node = self._topology.injectors[seen.stream]
            behind_us = _behind_us(node.watermark)
            if behind_us is not None and not node.members and seen.newest_at is not None:
                at = EventTimeMicros(seen.newest_at - behind_us)
                marks[seen.stream] = max(at, marks.get(seen.stream, at))
        return marks

    def low_watermark(self) -> EventTimeMicros:
        """The lowest output watermark of all computations."""
        names = self._topology.computations
        return min((self._authority.output_watermark(name) for name in names), default=TIME_MIN_US)

    def behind_us(self, stream: str) -> int:
        """How far behind the watermark the latest record of an injected stream was in this run; 0 if none was."""
        return self._injectors[stream].behind_us

    def injector_watermark(self, stream: str) -> EventTimeMicros:
        """The injector low watermark of an injected stream."""
        return self._injectors[stream].watermark

    @property
    def ended(self) -> frozenset[str]:
        """The injected streams whose input has ended for good."""
        nodes = self._topology.injectors
        return frozenset(
            name
            for name, one in self._injectors.items()
            if one.watermark == TIME_MAX_US and not nodes[name].signals
        )

    @property
    def ended_before(self) -> frozenset[str]:
        """Those that had ended when the run began: an earlier run has ended them."""
        return self._ended_before

    def streams_ahead(self) -> frozenset[str]:
        """The injected streams that are further ahead of the slowest computation than they may be."""
        limits = {n: node.skew_limit_us for n, node in self._topology.injectors.items() if node.skew_limit_us}
        if not limits:
            return frozenset()
        slowest = min(
            (self.input_watermark(name) for name in self._topology.computations), default=TIME_MAX_US
        )
        percentile_watermarks = {name: self.injector_watermark(name) for name in limits}
        return frozenset(
            name for name, limit in limits.items() if percentile_watermarks[name] - slowest > limit
        )

    def watch(self, stream: str) -> Watch:
        """What tasks are to look at while records of an injected stream come in."""
        now = self._clock.now_us()
        watch = self._injectors[stream].watch(now, with_delays=bool(self._percentiles))
        if self._imposed is None or watch.stamp_at is None:
            return watch
        return replace(watch, stamp_at=self._imposed[0].stamps.get(stream, watch.stamp_at))

    def observe(self, inputs: Iterable[InputObservation]) -> None:
        """Tell the injectors what a superstep saw; see `take_effect`."""
        now = self._clock.monotonic_us()
        for seen in inputs:
            self._injectors[seen.stream].observe(seen, now)

    def promise(self, stream: str, watermark: EventTimeMicros) -> None:
        """Tell an injector where its watermark is once the superstep is committed; see `take_effect`."""
        self._injectors[stream].advance(watermark, self._clock.monotonic_us())

    def take_effect(self) -> None:
        """Let what was observed count, now that it is committed."""
        for stream, injector in self._injectors.items():
            imposed = None if self._imposed is None else self._imposed[0].watermarks.get(stream, {})
            for percentile, authority in self._layers():
                at = injector.mark(percentile) if imposed is None else imposed.get(percentile, TIME_MIN_US)
                authority.update_injector(stream, EventTimeMicros(at))

    @property
    def has_changed(self) -> bool:
        """Whether time alone has moved a watermark, or a member was declared, and no commit records it yet."""
        return self._has_changed

    def note_commit(self) -> None:
        """A commit has journaled `positions`; what it changes, and `take_effect`, come after it."""
        self._journaled = self._authority.input_watermarks()
        self._has_changed = False

    def former_watermark(self, computation: str) -> EventTimeMicros:
        """The computation's input low watermark during the last superstep that was committed, in this run or before."""
        return self._journaled.get(computation, EventTimeMicros(TIME_MIN_US))

    def tick(self, heard: Iterable[str] = ()) -> None:
        """Leave out streams and members that have been silent for too long.

        Args:
            heard: streams with records in the current superstep, which are therefore not silent.
        """
        self._follow_the_clock(frozenset(heard))
        if not any(node.idle_after_us for node in self._topology.injectors.values()):
            return
        for stream in heard:
            self._injectors[stream].hear(self._clock.monotonic_us())
        before = self._authority.input_watermarks()
        self._settle()
        self._has_changed |= self._authority.input_watermarks() != before

    def _follow_the_clock(self, heard: frozenset[str]) -> None:
        """Time of arrival passes with the wall's, except for records that are on their way with their stamp.

        A new watermark alone is no work; a timer that it makes due is.
        """
        silent = [one for name, one in self._injectors.items() if one.is_ingress and name not in heard]
        for injector in silent:
            injector.advance(EventTimeMicros(self._clock.now_us()), self._clock.monotonic_us())
        if silent:
            self.take_effect()

    def advance(
        self,
        stream: str,
        watermark: EventTimeMicros,
        member: str | None = None,
        percentile: float = EXACT,
    ) -> None:
        """Move an injector's watermark explicitly."""
        self._injectors[stream].advance(watermark, self._clock.monotonic_us(), member, percentile)
        self._settle()

    def hold_back(self, computation: str, at: EventTimeMicros | None) -> None:
        """Hold a computation's input watermark back, at every percentile, or end that; see `WatermarkAuthority.hold_back`."""
        for _, authority in self._layers():
            authority.hold_back(computation, at)

    def declare(self, stream: str, status: MemberStatus, member: str | None = None) -> None:
        """Say of a stream or of one of its members that it is idle, gone, or expected again."""
        self._injectors[stream].declare(status, self._clock.monotonic_us(), member)
        self._has_changed = True
        self._settle()

    def finish(self, stream: str) -> None:
        """The stream's input has ended."""
        self._injectors[stream].finish(self._clock.monotonic_us())
        self._settle()

    def _settle(self) -> None:
        now = self._clock.monotonic_us()
        for injector in self._injectors.values():
            injector.settle(now)
        idle: Iterable[str] = [name for name, one in self._injectors.items() if one.is_idle(now)]
        if self._imposed is not None:
            idle = self._imposed[0].idle
        for _, authority in self._layers():
            authority.set_idle(idle)
        self.take_effect()

    def update_interval(
        self,
        interval: Interval,
        sequencer: Sequencer,
        hold: EventTimeMicros | None,
        percentile_watermarks: PercentileTimes,
    ) -> None:
        """Note what an interval still owes: the oldest of all, and the oldest but a share, by percentile."""
        for percentile, authority in self._layers():
            authority.update_interval(interval, sequencer, percentile_watermarks.get(percentile, hold))

    def set_undelivered(self, summaries: Mapping[str, ProductionSummary]) -> None:
        """Note which productions wait for their consumers, by stream."""
        wanted = {
            stream: summary for stream, summary in summaries.items() if self._topology.consumers_of(stream)
        }
        for percentile, authority in self._layers():
            authority.set_undelivered(
                {
                    stream: summary.percentile_oldest_at.get(percentile, summary.oldest_at)
                    for stream, summary in wanted.items()
                }
            )


def _behind_us(policy: WatermarkPolicy) -> int | None:
    """How far behind its newest record a stream's watermark is; ``None`` if the policy alone does not tell."""
    if isinstance(policy, Monotone):
        return 0
    return policy.bound_us if isinstance(policy, BoundedDisorder) else None
