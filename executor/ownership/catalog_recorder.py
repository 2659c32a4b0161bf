"""The records of a pipeline in the catalog: its topology once, and the facts of every commit.

Nothing waits for the catalog or depends on it, because it can be rebuilt from the log. So a catalog error is logged,
and the pipeline continues. A catalog that is slow to open is opened while supersteps run: a former owner that was
stopped inside a transaction may hold SQLite's lock indefinitely.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum, auto
from typing import cast

from millpond.executor.pipeline.code_fingerprint import code_fingerprint
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.catalog.entries import (
    CommitFacts,
    ComputationDefinition,
    PipelineDefinition,
    SinkDefinition,
    StreamDefinition,
    SubscriptionDefinition,
    definition_to_metadata,
)
from millpond.statestore.catalog.journal import CatalogJournal
from millpond.statestore.errors import MillpondError
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.writer import Committed
from millpond.statestore.rows.row import pack_fence
from millpond.statestore.store import Store
from millpond.statestore.types import Clock

_LOG = logging.getLogger("millpond")
_OPENING_S = 0.5
_EARLY_MAX = 1_024


class _State(Enum):
    """The use of a commit's facts."""

    NOT_OPEN = auto()
    """They are kept until the catalog is open."""

    OPENING = auto()
    """They are kept while a thread opens the catalog."""

    WRITING = auto()
    """They are handed to the catalog's writer."""

    ABSENT = auto()
    """They are discarded: there is no catalog, or it could not be opened."""

    CLOSED = auto()


class CatalogRecorder:
    """Writes to a store's catalog, if it has one, after each commit, without delaying the next."""

    def __init__(self, store: Store, topology: Topology, clock: Clock) -> None:
        self._store = store
        self._topology = topology
        self._clock = clock
        self._writer: CatalogJournal | None = None
        self._lock = threading.Lock()
        self._early: list[CommitFacts] = []
        self._opening: threading.Thread | None = None
        self._state = _State.NOT_OPEN

    def open(self) -> None:
        """Record the topology and start the background writer.

        Waits half a second at most; a catalog that takes longer is opened while the pipeline runs.
        """
        if self._store.catalog_url is None:
            self._become_absent()
            return
        with self._lock:
            self._state = _State.OPENING
        self._opening = threading.Thread(target=self._open, name="millpond-catalog-opening", daemon=True)
        self._opening.start()
        self._opening.join(_OPENING_S)

    def record(self, request: CommitRequest, committed: Committed, commit_ms: float | None = None) -> None:
        """Record the facts of a commit; until the catalog is open, keep them in memory."""
        if self._state in (_State.ABSENT, _State.CLOSED):
            return
        fences = {
            write.interval.app_id: pack_fence(write.fence.sequencer, write.fence.commit_number)
            for write in request.writes
        }
        watermarks = {w.interval.app_id: int(w.watermark) for w in request.writes if w.watermark is not None}
        facts = CommitFacts(
            version=committed.version,
            wall_us=self._clock.now_us(),
            txns=fences | dict(request.positions),
            metadata={**request.metadata, "kind": request.kind, "watermarks": watermarks},
            commit_ms=commit_ms,
        )
        with self._lock:
            writer = self._writer
            is_waiting = self._state in (_State.NOT_OPEN, _State.OPENING)
            # Beyond the bound the catalog is behind, and is rebuilt from the log on request.
            if is_waiting and len(self._early) < _EARLY_MAX:
                self._early.append(facts)
        if writer is not None:
            self._attempt(lambda: writer.submit(facts))

    def close(self) -> None:
        """Write the pending facts and stop; abandon a catalog that is still opening."""
        if self._opening is not None:
            self._opening.join(_OPENING_S)
        with self._lock:
            writer, self._writer, self._state = self._writer, None, _State.CLOSED
        if writer is not None:
            self._attempt(writer.close)

    def _open(self) -> None:
        self._attempt(self._start)
        if self._state is _State.OPENING:
            self._become_absent()

    def _start(self) -> None:
        catalog = self._store.catalog
        if catalog is None:
            return
        catalog.record_pipeline(definition_of(self._topology))
        with self._lock:
            if self._state is not _State.OPENING:
                return
            writer = CatalogJournal(catalog)
            for facts in self._early:
                writer.submit(facts)
            self._early = []
            self._writer, self._state = writer, _State.WRITING

    def _become_absent(self) -> None:
        with self._lock:
            self._early.clear()
            if self._state is not _State.CLOSED:
                self._state = _State.ABSENT

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MillpondError as error:
            _LOG.warning("the catalog is behind; it can be rebuilt from the log: %s", error)


def definition_of(topology: Topology) -> PipelineDefinition:
    """Return a topology in the catalog's form; `code_fingerprint` defines what counts as the code."""
    computations = tuple(
        ComputationDefinition(
            name=node.name,
            code_hash=code_fingerprint(node.computation, [one.key for one in node.subscriptions]),
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
        SubscriptionDefinition(
            consumer=node.name, stream=subscription.stream, key_extractor=_text(subscription.key)
        )
        for node in topology.computations.values()
        for subscription in node.subscriptions
    )
    names = {entry.stream for entry in subscriptions} | {sink.stream for sink in topology.sinks.values()}
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
    sinks = tuple(
        SinkDefinition(name=node.name, stream=node.stream, destination=node.sink.identity)
        for node in topology.sinks.values()
    )
    return PipelineDefinition(
        name=topology.name,
        computations=computations,
        streams=streams,
        subscriptions=subscriptions,
        sinks=sinks,
    )


def definition_metadata(topology: Topology) -> dict[str, JsonValue]:
    """Return the metadata of a commit from which on a pipeline runs."""
    definition = cast("JsonValue", definition_to_metadata(definition_of(topology)))
    return {"pipeline": topology.name, "definition": definition}


def _text(extractor: object) -> str:
    if extractor is None:
        return "the record's own key"
    if isinstance(extractor, str):
        return extractor
    if isinstance(extractor, tuple):
        return ", ".join(extractor)
    # The text of an object may contain its address, which differs from process to process.
    return str(getattr(extractor, "__qualname__", type(extractor).__qualname__))
