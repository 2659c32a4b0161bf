"""
What a pipeline tells the catalog: its topology once, and what every commit said.

Nothing waits for the catalog and nothing rests on it: it is rebuilt from the log when lost.
So a catalog that fails is reported in the log of the process, and the pipeline goes on. One that
is slow to open is opened beside the supersteps: a former owner that was stopped within a
transaction holds SQLite's lock for as long as it likes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable

import cloudpickle

from millpond.executor.pipeline.topology import Topology
from millpond.statestore.catalog.entries import (
    ComputationDefinition,
    PipelineDefinition,
    StreamDefinition,
    SubscriptionDefinition,
)
from millpond.statestore.catalog.facts import CommitFacts
from millpond.statestore.catalog.journal import CatalogJournal
from millpond.statestore.commit.committer import Committed
from millpond.statestore.commit.request import CommitRequest
from millpond.statestore.errors import MillpondError
from millpond.statestore.rows.row import pack_fence
from millpond.statestore.store import Store
from millpond.statestore.types import Clock

__all__ = ["CatalogRecorder", "definition_of"]

_LOG = logging.getLogger("millpond")
_OPENING_S = 0.5
_EARLY_MAX = 1_024


class CatalogRecorder:
    """
    Writes to a store's catalog, beside the commits and never before them.
    """

    def __init__(self, store: Store, topology: Topology, clock: Clock) -> None:
        self._store = store
        self._topology = topology
        self._clock = clock
        self._writer: CatalogJournal | None = None
        self._lock = threading.Lock()
        self._early: list[CommitFacts] = []
        self._opening: threading.Thread | None = None
        self._is_open = False
        self._closed = False

    def open(self) -> None:
        """
        Record the topology and start the background writer; a store without a catalog needs neither.

        Waits half a second at most; a catalog that takes longer is opened while the pipeline runs.
        """
        self._is_open = True
        if self._store.catalog_url is None:
            self._early.clear()
            return
        self._opening = threading.Thread(
            target=self._attempt, args=(self._start,), name="millpond-catalog-opening", daemon=True
        )
        self._opening.start()
        self._opening.join(_OPENING_S)

    def record(self, request: CommitRequest, committed: Committed, commit_ms: float | None = None) -> None:
        """
        Note what a commit said; what is noted before the catalog is open, the taking over itself, is kept.
        """
        if self._is_open and self._writer is None and not self._is_opening:
            return
        fences = {
            write.interval.app_id: pack_fence(write.fence.sequencer, write.fence.commit_number)
            for write in request.writes
        }
        marks = {w.interval.app_id: int(w.watermark) for w in request.writes if w.watermark is not None}
        facts = CommitFacts(
            version=committed.version,
            wall_us=self._clock.now_us(),
            txns=fences | dict(request.positions),
            metadata={**request.metadata, "kind": request.kind, "watermarks": marks},
            commit_ms=commit_ms,
        )
        with self._lock:
            writer = self._writer
            if writer is None:
                # Beyond the bound the catalog is behind, and is rebuilt from the log when asked for.
                self._early += [facts] * (len(self._early) < _EARLY_MAX)
        if writer is not None:
            self._attempt(lambda: writer.submit(facts))

    def close(self) -> None:
        """
        Write what is waiting and stop; a catalog that is not open by now is left behind.
        """
        if self._opening is not None:
            self._opening.join(_OPENING_S)
        with self._lock:
            writer, self._writer, self._closed = self._writer, None, True
        if writer is not None:
            self._attempt(writer.close)

    @property
    def _is_opening(self) -> bool:
        return self._opening is not None and self._opening.is_alive()

    def _start(self) -> None:
        catalog = self._store.catalog
        if catalog is None:
            return
        catalog.record_pipeline(definition_of(self._topology))
        with self._lock:
            if self._closed:
                return
            writer = CatalogJournal(catalog)
            for facts in self._early:
                writer.submit(facts)
            self._early = []
            self._writer = writer

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MillpondError as error:
            _LOG.warning("the catalog is behind; it can be rebuilt from the log: %s", error)


def definition_of(topology: Topology) -> PipelineDefinition:
    """
    A topology as the catalog keeps it; the code's version is a hash of the pickled computation.
    """
    computations = tuple(
        ComputationDefinition(
            name=node.name,
            code_hash=hashlib.sha256(cloudpickle.dumps(node.computation)).hexdigest(),
            codec=node.computation.codec.name,
            options={
                "exactly_once": node.exactly_once,
                "on_error": node.on_error,
                "retries": node.retries,
                "intervals": node.intervals,
                "on_late": node.on_late,
            },
        )
        for node in topology.computations.values()
    )
    subscriptions = tuple(
        SubscriptionDefinition(consumer=node.name, stream=one.stream, key_extractor=_text(one.key))
        for node in topology.computations.values()
        for one in node.subscriptions
    )
    names = {one.stream for one in subscriptions} | {sink.stream for sink in topology.sinks.values()}
    names |= {stream for node in topology.computations.values() for stream in node.produces}
    streams = tuple(
        StreamDefinition(
            name=name,
            producers=(
                ("injector",)
                if name in topology.injectors
                else tuple(node.name for node in topology.producers_of(name))
            ),
        )
        for name in sorted(names)
    )
    return PipelineDefinition(
        name=topology.name, computations=computations, streams=streams, subscriptions=subscriptions
    )


def _text(extractor: object) -> str:
    if extractor is None:
        return "the record's own key"
    if isinstance(extractor, str):
        return extractor
    return getattr(extractor, "__qualname__", repr(extractor))
