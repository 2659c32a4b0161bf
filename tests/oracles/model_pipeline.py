"""The semantics of a whole pipeline in plain Python: slow, obvious, and importable.

`ModelPipeline` runs supersteps over dicts: no store, no files, no intervals, no soft state. A runner
is right if it leaves the same rows and the same productions for the same input. In each superstep
every computation gets the new outside records and the productions of the previous superstep;
watermarks are computed from their definition (MillWheel §4.5) each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millpond.executor.inputs.keys import extract_key
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import held_back
from millpond.executor.time.observations import TimesSeen
from millpond.executor.time.watermark_policies import InjectorLogic
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.row import TimeDomain
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros
from tests.oracles.model import ModelInterval, ModelProduction, ModelRecord, ModelRow

_SUPERSTEPS_MAX = 10_000


class ModelPipeline:
    """A pipeline's state and everything it has ever produced.

    Args:
        topology: the checked pipeline; its injectors' key, time and id must be names of fields,
            times integers in microseconds, ids text.

    Attributes:
        produced: every production, by stream, in order of production.
        dead_letters: number of records and timers that could not be processed.
        duplicates: number of outside records that had been consumed before.
    """

    def __init__(self, topology: Topology) -> None:
        self.produced: dict[str, list[ModelProduction]] = {}
        self.dead_letters: int = 0
        self.duplicates: int = 0
        self._topology = topology
        self._intervals = {name: ModelInterval(node) for name, node in topology.computations.items()}
        self._injectors: dict[str, InjectorLogic] = {
            name: node.watermark.start() for name, node in topology.injectors.items()
        }
        self._pending: list[ModelProduction] = []
        self._reported = {name: int(TIME_MIN_US) for name in topology.computations}

    def rows(self, computation: str) -> dict[str, ModelRow]:
        """Return the computation's rows by key."""
        return self._intervals[computation].rows()

    def superstep(self, inputs: Mapping[str, Sequence[Mapping[str, Any]]], wall_time: int) -> None:
        """Run a superstep of outside records, undelivered productions and due timers.

        Args:
            inputs: rows by injected stream.
            wall_time: the superstep's wall time.
        """
        marks = self.input_watermarks()
        delivered, self._pending = self._pending, []
        weak: list[ModelProduction] = []
        for name in self._topology.fused_order:
            node = self._topology.computations[name]
            records = [*self._injected(node, inputs), *self._delivered(node, [*delivered, *weak])]
            bundle = self._intervals[name].process(records, marks[name], wall_time)
            self.dead_letters += len(bundle.dead_letters)
            self.duplicates += bundle.duplicates
            for production in bundle.productions:
                self.produced.setdefault(production.stream, []).append(production)
                # The model is never slow: every weak production is consumed in time.
                is_fused = production.stream in self._topology.fused.get(name, ())
                (weak if is_fused else self._pending).append(production)
        for stream, rows in inputs.items():
            self._observe(stream, rows)

    def finish(self, wall_time: int) -> None:
        """End the inputs and run until no work is left.

        Raises:
            InvalidError: the pipeline does not come to rest.
        """
        for injector in self._injectors.values():
            injector.finish()
        for _ in range(_SUPERSTEPS_MAX):
            self.superstep({}, wall_time)
            if not self.has_work(wall_time):
                return
        raise InvalidError("the pipeline does not come to rest", pipeline=self._topology.name)

    def has_work(self, wall_time: int) -> bool:
        """Return True if a superstep without input would have an effect."""
        if any(self._topology.consumers_of(production.stream) for production in self._pending):
            return True
        marks = self.input_watermarks()
        return any(
            _reached(interval.next_at(TimeDomain.EVENT), marks[name])
            or _reached(interval.next_at(TimeDomain.WALL), wall_time)
            for name, interval in self._intervals.items()
        )

    def input_watermarks(self) -> dict[str, int]:
        """Return each computation's input low watermark: the greatest solution of the definition."""
        bounds = dict.fromkeys(self._topology.computations, int(TIME_MAX_US))
        while True:
            improved = {name: self._bound(node, bounds) for name, node in self._topology.computations.items()}
            if improved == bounds:
                break
            bounds = improved
        self._reported = {name: max(at, self._reported[name]) for name, at in bounds.items()}
        return dict(self._reported)

    def _bound(self, node: ComputationNode, known: Mapping[str, int]) -> int:
        bounds = [int(TIME_MAX_US)]
        for subscription in node.subscriptions:
            stream = subscription.stream
            if stream in self._injectors:
                bounds.append(int(self._injectors[stream].watermark))
            bounds += [p.at for p in self._pending if p.stream == stream]
            behind = self._after(node) if subscription.feedback else ()
            for producer in self._topology.producers_of(stream):
                if producer.name in behind:
                    continue
                hold = self._intervals[producer.name].hold()
                lagging = held_back(EventTimeMicros(known[producer.name]), producer.horizon_us)
                bounds += [lagging] if hold is None else [lagging, hold]
        return min(bounds)

    def _after(self, node: ComputationNode) -> set[str]:
        """Return the computations downstream of ``node``, and ``node``."""
        known = {node.name}
        while True:
            made = {stream for name in known for stream in self._topology.computations[name].produces}
            more = {
                name
                for name, other in self._topology.computations.items()
                if any(subscription.stream in made for subscription in other.subscriptions)
            }
            if more <= known:
                return known
            known |= more

    def _injected(
        self, node: ComputationNode, inputs: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> list[ModelRecord]:
        records = []
        for subscription in node.subscriptions:
            injector = self._topology.injectors.get(subscription.stream)
            for row in inputs.get(subscription.stream, ()) if injector else ():
                own = row[str(injector.key)] if injector else None
                key = self._key(lambda own=own, row=row, s=subscription: extract_key(s.key, own, row))
                at = row[str(injector.at)] if injector else None
                if key is None or at is None:
                    self.dead_letters += 1
                    continue
                text = row[str(injector.id)] if injector and injector.id else None
                record_id = None if text is None else text.encode()
                records.append(
                    ModelRecord(stream=subscription.stream, key=key, value=dict(row), at=at, id=record_id)
                )
        return records

    def _delivered(self, node: ComputationNode, productions: Sequence[ModelProduction]) -> list[ModelRecord]:
        records = []
        for subscription in node.subscriptions:
            for production in productions:
                if production.stream != subscription.stream:
                    continue
                key = self._key(lambda p=production, s=subscription: extract_key(s.key, p.key, p.value))
                if key is None:
                    self.dead_letters += 1
                else:
                    records.append(
                        ModelRecord(
                            stream=production.stream, key=key, value=production.value, at=production.at
                        )
                    )
        return records

    def _observe(self, stream: str, rows: Sequence[Mapping[str, Any]]) -> None:
        node = self._topology.injectors[stream]
        keys = [consumer.subscription.key for consumer in self._topology.consumers_of(stream)]
        readable = [
            row[str(node.at)]
            for row in rows
            if row[str(node.at)] is not None
            and any(
                self._key(lambda k=k, row=row: extract_key(k, row[str(node.key)], row)) is not None
                for k in keys
            )
        ]
        if readable:
            self._injectors[stream].observe(
                TimesSeen(newest_at=EventTimeMicros(max(readable)), oldest_at=EventTimeMicros(min(readable)))
            )

    @staticmethod
    def _key(extract: Callable[..., str]) -> str | None:
        try:
            return extract()
        except InvalidError:
            return None


def _reached(at: int | None, now: int) -> bool:
    return at is not None and at <= now
