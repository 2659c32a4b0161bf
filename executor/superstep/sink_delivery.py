"""Sink delivery: committed productions go to the sinks, each superstep exactly once.

A sink gets superstep *n* after *n* is committed and before *n + 1* is. So after a crash at most the last superstep is
missing, and the sink's own Delta ``txn`` records the last superstep that it has (architecture §6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.pipeline.checks import refuse_sink_around
from millpond.executor.pipeline.nodes import SinkNode, addressed
from millpond.executor.pipeline.topology import Topology
from millpond.executor.sinks.columns import SinkRecord, refuse_sink_ahead
from millpond.executor.sinks.delta_table import TableWriter
from millpond.executor.sinks.fork import SinkFolder
from millpond.executor.sinks.sink import DeltaSink, RecordingSink, SinkWriter
from millpond.executor.sinks.table_upkeep import TableUpkeep
from millpond.executor.superstep.delivery import ProductionSource, read_productions
from millpond.statestore.app_ids import AppId, is_elsewhere, sink_reached, superstep_reached
from millpond.statestore.failpoint import reach
from millpond.statestore.history.lineage import Origin
from millpond.statestore.rows.row import with_value_texts
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Objects, Rng, Superstep

_LOG = logging.getLogger("millpond")


class SinkDelivery:
    """Delivery of each committed superstep's productions to the sinks, in parallel with the next superstep.

    Attributes:
        on_failure: called in the sinks' thread with a sink's error: on a quiet stream the next superstep, which
            would `wait`, may never come.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        clock: Clock,
        rng: Rng,
        *,
        in_background: bool,
        has_upkeep: bool,
        row_files: Objects | None = None,
    ) -> None:
        self._store = store
        self._row_files = row_files or store.objects
        self._topology = topology
        self._clock = clock
        self._rng = rng
        self._in_background = in_background
        self._has_upkeep = has_upkeep
        self._writers: list[tuple[str, SinkWriter]] = []
        # Of each sink: the name of its record in the store, its destination, and the superstep that it had when opened.
        self._opened: list[tuple[str, str, Superstep]] = []
        # The writers of sinks that begin with the next superstep.
        self._newcomers: list[SinkWriter] = []
        # The records of the pipeline's sinks, and of sinks that it had before.
        self._serving: list[str] = []
        self._ceasing: list[str] = []
        self._executor: ThreadPoolExecutor | None = None
        self._upkeep: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self.on_failure: Callable[[BaseException], None] = partial(_LOG.error, "a sink has failed: %s")

    def open(self, superstep: Superstep) -> None:
        nodes = self._topology.sinks.values()
        self._opened, self._newcomers = [], []
        self._writers = [(node.stream, self._open_sink(node, superstep)) for node in nodes]
        record_of = partial(AppId.SINK_SERVED.of, self._topology.name)
        self._serving = [record_of(""), *(record_of(node.name) for node in nodes)]
        # Once a start: a store may have thousands of records.
        known = (app_id for app_id in self._store.committer.snapshot.txns if app_id.startswith(record_of("")))
        self._ceasing = [app_id for app_id in known if app_id not in self._serving]

    def records(
        self, superstep: Superstep, txns: Mapping[str, int], produced: Collection[str]
    ) -> dict[str, int]:
        """Return what a superstep's commit records of the sinks, once a run: a later run finds their tables gone by it."""
        records = self._served(superstep, txns)
        for (stream, _), (app_id, identity, had) in zip(self._writers, self._opened, strict=True):
            stored = txns.get(app_id, 0)
            if had and sink_reached(had, identity) > stored:
                records[app_id] = sink_reached(had, identity)
            elif not superstep_reached(stored, identity) and not _kept_as(stream).isdisjoint(produced):
                # Nobody removes the first rows unnoticed: until the next superstep they would be delivered again.
                records[app_id] = sink_reached(superstep, identity)
        return records

    def _served(self, superstep: Superstep, txns: Mapping[str, int]) -> dict[str, int]:
        """Return which sinks the pipeline begins or ceases to serve with this superstep."""
        begun = {app_id: superstep << 1 for app_id in self._serving if txns.get(app_id, 1) & 1}
        return begun | {
            app_id: superstep - 1 << 1 | 1 for app_id in self._ceasing if not txns.get(app_id, 1) & 1
        }

    def catch_up(self, superstep: Superstep, sources: Sequence[ProductionSource]) -> None:
        """Deliver the last superstep to the sinks that lack it because of a crash."""
        if self._in_background and self._writers:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millpond-sinks")
            self._upkeep = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millpond-sink-upkeep")
        self._write(superstep, sources, without=self._newcomers)

    def deliver(self, superstep: Superstep, sources: Sequence[ProductionSource]) -> None:
        """Start to write a committed superstep's productions; `wait` raises the errors."""
        if not self._writers or not sources:
            return
        streams = [kept for stream, _ in self._writers for kept in _kept_as(stream)]
        if not any(source.concerns(streams) for source in sources):
            return
        if self._executor is None:
            self._write(superstep, sources)
        else:
            self._running = self._executor.submit(self._write, superstep, tuple(sources))
            self._running.add_done_callback(self._report)

    def _report(self, delivery: Future[None]) -> None:
        failure = None if delivery.cancelled() else delivery.exception()
        if failure is not None:
            self.on_failure(failure)

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None

    def close(self) -> None:
        try:
            self.wait()
        finally:
            # Upkeep last, because the end of a delivery starts it; the leases outlast both.
            for executor in (self._executor, self._upkeep):
                if executor is not None:
                    executor.shutdown()
            self._executor = self._upkeep = None
        for _, writer in self._writers:
            if (upkeep := self._upkeep_of(writer)) is not None:
                upkeep.close()

    def _open_sink(self, node: SinkNode, superstep: Superstep) -> SinkWriter:
        lineage, pipeline = self._store.lineage, self._topology.name
        sink = node.sink
        refuse_sink_around(node, "store", f"{self._store.path}/rows")
        app_id = AppId.SINK_REACHED.of(pipeline, node.name)
        stored = self._store.committer.snapshot.txns.get(app_id, 0)
        record = SinkRecord(lineage, pipeline, node.name, superstep, self._expected(stored, sink.identity))
        # Another kind of recording sink is given the lineage, and tells copies of a store apart itself.
        is_placed = isinstance(sink, DeltaSink) or not isinstance(sink, RecordingSink)
        if is_placed and lineage.copied.origin is Origin.FORK and not lineage.has_taken(sink.identity):
            folder = SinkFolder(
                store=self._store.path,
                storage_options=self._store.storage_options,
                clock=self._clock,
                rng=self._rng,
            )
            sink = folder.own(sink, record)
            record = replace(record, expected=self._expected(stored, sink.identity))
        if isinstance(sink, DeltaSink):
            sink = sink.following(self._store.durability)
        if isinstance(sink, RecordingSink):
            writer = sink.open_for(record, clock=self._clock, rng=self._rng)
        else:
            writer = sink.open(lineage.copied.id, pipeline, node.name, clock=self._clock, rng=self._rng)
            refuse_sink_ahead(node.name, writer.delivered, superstep)
        had = writer.delivered
        if stored and not had and is_elsewhere(stored, sink.identity):
            _LOG.warning(
                "the sink has another path than in earlier runs, whose rows are not there: sink=`%s` path=`%s`",
                node.name,
                sink.identity,
            )
        self._opened.append((app_id, sink.identity, had))
        if self._begins(node, superstep, is_known=bool(had or stored)):
            self._newcomers.append(writer)
        return writer

    def _begins(self, node: SinkNode, superstep: Superstep, *, is_known: bool) -> bool:
        """Return True if the pipeline did not have the sink in the last superstep, so that the next is its first."""
        txns, pipeline = self._store.committer.snapshot.txns, self._topology.name
        served = txns.get(AppId.SINK_SERVED.of(pipeline, node.name))
        if served is None:
            # Stores of earlier versions do not tell.
            return not is_known and AppId.SINK_SERVED.of(pipeline, "") in txns
        if not served & 1 or served >> 1 >= superstep:
            return False
        _LOG.warning(
            "the sink was not in the pipeline for some supersteps, and lacks the results of these; a new store has all of "
            "them (millpond replay): sink=`%s` path=`%s` supersteps=`%d`",
            node.name,
            node.sink.identity,
            superstep - (served >> 1),
        )
        return True

    def _expected(self, stored: int, identity: str) -> int:
        """Return the superstep that a sink must have: of what the original had delivered before, a copy's sinks have none."""
        lineage = self._store.lineage
        expected = superstep_reached(stored, identity)
        return expected if expected > lineage.forks.get((lineage.copied.id, self._topology.name), 0) else 0

    def _write(
        self,
        superstep: Superstep,
        sources: Sequence[ProductionSource],
        without: Collection[SinkWriter] = (),
    ) -> None:
        # A sink knows the last superstep that it has: after a crash a sink that has this one skips it.
        behind = [
            (stream, writer)
            for stream, writer in self._writers
            if writer not in without and writer.delivered < superstep
        ]
        if not behind:
            return
        names = [kept for stream, _ in behind for kept in _kept_as(stream)]
        wanted = [source for source in sources if source.concerns(names)]
        productions = read_productions(self._row_files, wanted)
        for stream, writer in behind:
            part = productions.filter(
                pc.is_in(productions.column("stream"), pa.array(sorted(_kept_as(stream))))
            )
            if part.num_rows:
                reach("sink.behind")
                part = part.drop_columns(["stream"])
                writer.write(superstep, part if isinstance(writer, TableWriter) else with_value_texts(part))
                reach("sink.delivered")
                self._keep_up(writer)

    def _keep_up(self, writer: SinkWriter) -> None:
        upkeep = self._upkeep_of(writer)
        work = None if upkeep is None else upkeep.due()
        if work is not None and self._upkeep is not None:
            self._upkeep.submit(work)
        elif work is not None:
            work()

    def _upkeep_of(self, writer: SinkWriter) -> TableUpkeep | None:
        return writer.upkeep if self._has_upkeep and isinstance(writer, TableWriter) else None


def _kept_as(stream: str) -> frozenset[str]:
    """Return the streams under which rows keep productions for a stream's sinks."""
    return frozenset({stream, addressed(stream)})
