"""
The time of a pipeline: its injectors' watermarks and what follows from them for everybody.

What a superstep observes takes effect only once it is committed: until then records of that
superstep may still be lost with it, and no watermark may have passed them (I7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millpond.executor.bundle import InputObservation
from millpond.executor.injector_time import InjectorTime, Standing
from millpond.executor.observation import Watch
from millpond.executor.pending import PendingProductions
from millpond.executor.position import watermark_app_id
from millpond.executor.topology import Topology
from millpond.executor.watermark import WatermarkAuthority
from millpond.statestore.interval import Interval
from millpond.statestore.types import TIME_MIN_US, Clock, EventTimeMicros, Sequencer

__all__ = ["TimeKeeper"]


class TimeKeeper:
    """
    Injectors and the watermark authority of one pipeline, restorable from its positions.
    """

    def __init__(self, topology: Topology, clock: Clock) -> None:
        self._topology = topology
        self._clock = clock
        self._authority = WatermarkAuthority(topology)
        self._injectors: dict[str, InjectorTime] = {}

    def restore(self, positions: Mapping[str, int]) -> None:
        """
        Go on from the watermarks that the last commits journaled.
        """
        pipeline = self._topology.name
        for name, injector in self._topology.injectors.items():
            saved = EventTimeMicros(positions.get(watermark_app_id(pipeline, "injector", name), TIME_MIN_US))
            self._injectors[name] = InjectorTime(injector, saved, self._clock.monotonic_us())
            self._authority.update_injector(name, saved)
        app_ids = {
            name: watermark_app_id(pipeline, "computation", name) for name in self._topology.computations
        }
        self._authority.restore(
            {
                name: EventTimeMicros(positions[app_id])
                for name, app_id in app_ids.items()
                if app_id in positions
            }
        )

    def positions(self) -> dict[str, int]:
        """
        What `restore` needs, by application id.
        """
        pipeline = self._topology.name
        injected = {
            watermark_app_id(pipeline, "injector", name): int(injector.watermark)
            for name, injector in self._injectors.items()
        }
        computed = {
            watermark_app_id(pipeline, "computation", name): int(self.input_watermark(name))
            for name in self._topology.computations
        }
        return injected | computed

    def input_watermark(self, computation: str) -> EventTimeMicros:
        """
        The computation's input low watermark.
        """
        return self._authority.input_watermark(computation)

    def low_watermark(self) -> EventTimeMicros:
        """
        The lowest output watermark of all computations.
        """
        names = self._topology.computations
        return min((self._authority.output_watermark(name) for name in names), default=TIME_MIN_US)

    def injector_watermark(self, stream: str) -> EventTimeMicros:
        """
        The injector low watermark of an injected stream.
        """
        return self._injectors[stream].watermark

    def watch(self, stream: str) -> Watch:
        """
        What tasks are to look at while records of an injected stream come in.
        """
        return self._injectors[stream].watch()

    def observe(self, inputs: Iterable[InputObservation]) -> None:
        """
        Tell the injectors what a superstep saw; see `take_effect`.
        """
        now = self._clock.monotonic_us()
        for seen in inputs:
            self._injectors[seen.stream].observe(seen, now)

    def take_effect(self) -> None:
        """
        Let what was observed count, now that it is committed.
        """
        for stream, injector in self._injectors.items():
            self._authority.update_injector(stream, injector.watermark)

    def tick(self) -> bool:
        """
        Leave out who has been silent for too long.

        Returns:
            Whether that moved anybody's watermark.
        """
        if not any(node.idle_after_us for node in self._topology.injectors.values()):
            return False
        before = self._authority.input_watermarks()
        self._settle()
        return self._authority.input_watermarks() != before

    def advance(self, stream: str, watermark: EventTimeMicros, member: str | None = None) -> None:
        """
        Move an injector's watermark by hand.
        """
        self._injectors[stream].advance(watermark, self._clock.monotonic_us(), member)
        self._settle()

    def declare(self, stream: str, standing: Standing, member: str | None = None) -> None:
        """
        Say of a stream or of one of its members that it is idle, gone, or expected again.
        """
        self._injectors[stream].declare(standing, self._clock.monotonic_us(), member)
        self._settle()

    def finish(self, stream: str) -> None:
        """
        The stream's input has ended.
        """
        self._injectors[stream].finish(self._clock.monotonic_us())
        self._settle()

    def _settle(self) -> None:
        now = self._clock.monotonic_us()
        for injector in self._injectors.values():
            injector.settle(now)
        self._authority.set_idle(name for name, one in self._injectors.items() if one.is_idle(now))
        self.take_effect()

    def update_interval(self, interval: Interval, sequencer: Sequencer, hold: EventTimeMicros | None) -> None:
        """
        Note what an interval still owes.
        """
        self._authority.update_interval(interval, sequencer, hold)

    def set_undelivered(self, pending: PendingProductions) -> None:
        """
        Note which productions wait for their consumers.
        """
        self._authority.set_undelivered(
            {
                stream: summary.oldest_at
                for stream, summary in pending.summaries.items()
                if self._topology.consumers_of(stream)
            }
        )
