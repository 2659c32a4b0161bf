"""Undelivered productions, read and keyed for their consumers, in both runners.

Each file is read once and each consumer extracts its keys once, however many of its intervals
run in this process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from millpond.executor.bundle.bundle import DeadLetter, Deliveries
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.weak import addressed
from millpond.executor.superstep.delivery import (
    Extracted,
    ProductionSource,
    deliveries_of,
    keyless_letters,
    weak_only,
    within,
)
from millpond.statestore.interval import Interval


def addresses_of(node: ComputationNode) -> frozenset[str]:
    """The streams under which weak productions are kept to be handed to a computation in another task."""
    return frozenset(addressed(subscription.stream) for subscription in node.subscriptions)


class UndeliveredProductions:
    """The productions that one superstep delivers.

    Args:
        sources: committed files with productions of the last superstep.
        read: returns the productions of a file; called once per file.
        handed_on: uncommitted files of this superstep, with weak productions.
    """

    def __init__(
        self,
        sources: Sequence[ProductionSource],
        read: Callable[[ProductionSource], pa.Table],
        *,
        handed_on: Sequence[ProductionSource] = (),
    ) -> None:
        self._sources = sources
        self._read = read
        self._handed_on = handed_on
        self._tables: dict[ProductionSource, pa.Table] = {}
        self._extracted: dict[str, tuple[Extracted, ...]] = {}

    def read_committed(self) -> None:
        """Read all committed files now instead of when a consumer first needs them.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        for source in self._sources:
            self._table(source)

    def extracted(self, node: ComputationNode) -> tuple[Extracted, ...]:
        """A computation's productions, stream by stream, with its own keys; empty if nothing waits for it.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        if node.name not in self._extracted:
            tables = self._tables_for(node)
            self._extracted[node.name] = deliveries_of(pa.concat_tables(tables), node) if tables else ()
        return self._extracted[node.name]

    def deliveries(self, node: ComputationNode, interval: Interval) -> list[Deliveries]:
        """The part of one interval; no entry is empty.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        parts = (within(extracted.deliveries, interval) for extracted in self.extracted(node))
        return [part for part in parts if part is not None]

    def letters(self, node: ComputationNode) -> list[DeadLetter]:
        """A dead letter for each record from which the computation's key extractor got no key.

        Raises:
            DataError: a file is missing or its bytes are wrong.
        """
        return [
            letter
            for extracted in self.extracted(node)
            if extracted.errors
            for letter in keyless_letters(node.name, extracted)
        ]

    def _tables_for(self, node: ComputationNode) -> list[pa.Table]:
        addresses = addresses_of(node)
        return [
            *(self._table(source) for source in self._sources if source.concerns(node.inbox)),
            *(weak_only(self._table(source)) for source in self._handed_on if source.concerns(addresses)),
        ]

    def _table(self, source: ProductionSource) -> pa.Table:
        if source not in self._tables:
            self._tables[source] = self._read(source)
        return self._tables[source]
