"""Recording of a pipeline's topologies in the catalog.

Nothing waits for the catalog and nothing depends on it, so an error is logged, and the pipeline continues. A thread
writes, because a former owner that was stopped inside a transaction holds SQLite's lock; after half a minute the
catalog goes on in another file.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from queue import Full, Queue
from typing import cast

from millpond.executor.pipeline.code_fingerprint import code_fingerprint
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.catalog.topology import (
    ComputationDefinition,
    PipelineDefinition,
    SinkDefinition,
    StreamDefinition,
    SubscriptionDefinition,
    definition_from_metadata,
)
from millpond.statestore.errors import MillpondError
from millpond.statestore.log.action import JsonValue
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.writer import Committed
from millpond.statestore.store import Store

_LOG = logging.getLogger("millpond")
_PATIENCE_S = 0.5
_WAITING_MAX = 1_024


class CatalogRecorder:
    """A writer of code versions to a store's catalog, off the path of commits."""

    def __init__(self, store: Store, topology: Topology) -> None:
        self._store = store
        self._topology = topology
        self._waiting: Queue[PipelineDefinition | None] = Queue(_WAITING_MAX)
        self._is_open = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Record the topology; wait for a slow catalog half a second at most."""
        if self._store.catalog_url is None:
            return
        self._waiting.put(definition_of(self._topology))
        self._thread = threading.Thread(target=self._write, name="millpond-catalog", daemon=True)
        self._thread.start()
        self._is_open.wait(_PATIENCE_S)

    def record(self, request: CommitRequest, _committed: Committed) -> None:
        definition = definition_from_metadata(request.metadata)
        if definition is not None and self._store.catalog_url is not None:
            # A catalog that is stuck falls behind instead of holding up commits; the log has the topology.
            try:
                self._waiting.put_nowait(definition)
            except Full:
                _LOG.warning("the catalog is behind; it can be rebuilt from the log: its writer is stuck")

    def close(self) -> None:
        """Record what is waiting and stop; abandon a catalog that is still opening."""
        if self._thread is not None:
            try:
                self._waiting.put_nowait(None)
            except Full:
                # Stuck in the catalog: joining would hang, and the thread ends with the process.
                return
            self._thread.join(None if self._is_open.is_set() else _PATIENCE_S)

    def _write(self) -> None:
        while (definition := self._waiting.get()) is not None:
            try:
                catalog = self._store.catalog
                if catalog is not None:
                    catalog.record_pipeline(definition)
            except MillpondError as error:
                _LOG.warning("the catalog is behind; it can be rebuilt from the log: %s", error)
            self._is_open.set()


def definition_of(topology: Topology) -> PipelineDefinition:
    nodes, sinks = topology.computations.values(), topology.sinks.values()
    kept = ("exactly_once", "on_error", "retries", "intervals", "on_late")
    names = {one.stream for node in nodes for one in node.subscriptions} | {sink.stream for sink in sinks}
    names = names.union(*(node.produces for node in nodes))
    producers = {name: tuple(node.name for node in topology.producers_of(name)) for name in sorted(names)}
    return PipelineDefinition(
        name=topology.name,
        computations=tuple(
            ComputationDefinition(
                name=node.name,
                code_hash=code_fingerprint(node.computation, [one.key for one in node.subscriptions]),
                codec=node.computation.codec.name,
                options={name: getattr(node, name) for name in kept},
            )
            for node in nodes
        ),
        streams=tuple(
            StreamDefinition(name=name, producers=("injector",) if name in topology.injectors else made_by)
            for name, made_by in producers.items()
        ),
        subscriptions=tuple(
            SubscriptionDefinition(consumer=node.name, stream=one.stream, key_extractor=_text(one.key))
            for node in nodes
            for one in node.subscriptions
        ),
        sinks=tuple(
            SinkDefinition(name=sink.name, stream=sink.stream, destination=sink.sink.identity)
            for sink in sinks
        ),
    )


def definition_metadata(topology: Topology) -> dict[str, JsonValue]:
    """Return a commit's metadata about the pipeline that runs from that commit on."""
    definition = cast("JsonValue", asdict(definition_of(topology)))
    return {"pipeline": topology.name, "definition": definition}


def _text(extractor: object) -> str:
    if extractor is None:
        return "the record's own key"
    if isinstance(extractor, str):
        return extractor
    if isinstance(extractor, tuple):
        return ", ".join(extractor)
    # The text of an object may have its address, which differs from process to process.
    return str(getattr(extractor, "__qualname__", type(extractor).__qualname__))
