"""Deliveries: undelivered productions on their way to the consumers' intervals, in both runners.

A production lives in the row update of the key that produced it (strong productions, MillWheel §6.1.2). Superstep
*n + 1* reads the productions of superstep *n* from the committed files, lets every consumer extract its own key
(§4.2), and hands each interval its part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.timers import oldest_but
from millpond.executor.computation.values import ArrowValues, JsonValues, Values
from millpond.executor.inputs.keys import KeyExtractor, PaneKey, extract_key_column, extract_keys
from millpond.executor.interval.bundle import DeadLetter, Deliveries, ProductionSummary
from millpond.executor.pipeline.nodes import ComputationNode, addressed
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import PercentileTimes
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.key_columns import KeyTexts
from millpond.statestore.rows.row import PRODUCTION_TYPE, flat_productions, one_array, with_value_texts
from millpond.statestore.rows.state_schema import value_fields
from millpond.statestore.types import EventTimeMicros, Objects, Superstep, quickly_pickled

PRODUCTION_SCHEMA = pa.schema(list(PRODUCTION_TYPE))
"""One production per row: stream, key, value, value_bytes, at."""


@quickly_pickled
@dataclass(frozen=True, slots=True, kw_only=True)
class ProductionSource:
    """A committed file that holds unconsumed productions.

    Attributes:
        superstep: only rows of this superstep count; a file that an OPTIMIZE merged may hold older rows, whose
            productions are delivered.
        streams: streams of the productions; empty when unknown.
        interval: only rows in this interval count; ``None`` for all rows.
        renames: streams that were renamed with their computation: stored name, current name.
    """

    path: str
    superstep: Superstep
    streams: frozenset[str] = frozenset()
    interval: Interval | None = None
    renames: tuple[tuple[str, str], ...] = ()

    def current(self, productions: pa.Table) -> pa.Table:
        streams = productions.column("stream")
        for stored, name in self.renames:
            streams = pc.if_else(pc.equal(streams, stored), name, streams)
        return productions.set_column(0, PRODUCTION_SCHEMA.field(0), streams) if self.renames else productions

    def concerns(self, streams: Iterable[str]) -> bool:
        return not self.streams or not self.streams.isdisjoint(streams)


def flatten_productions(updates: pa.Table) -> pa.Table:
    """Return the productions of row updates, one per row, in the order of rows and of emission."""
    flat = flat_productions(updates)
    return pa.Table.from_arrays(flat.flatten(), schema=pa.schema(list(flat.type)))


def join_productions(tables: Sequence[pa.Table]) -> pa.Table:
    """Return productions of several files as one table; a field of values with a schema that some lack is null there."""
    is_alike = all(table.column_names == tables[0].column_names for table in tables)
    return pa.concat_tables(tables, promote_options="none" if is_alike else "default")


def values_of(productions: pa.Table) -> Values:
    """Return the values of productions: columns if all of them have one schema, otherwise text or bytes."""
    typed = value_fields(productions.schema)
    for one in typed:
        column = one_array(productions.column(one.name))
        if not column.null_count:
            return ArrowValues(column)
    if typed:
        productions = with_value_texts(productions)
    return JsonValues(one_array(productions.column("value")), one_array(productions.column("value_bytes")))


def read_productions(objects: Objects, sources: Sequence[ProductionSource]) -> pa.Table:
    tables = [_read_source(objects, source) for source in sources]
    return join_productions(tables) if tables else PRODUCTION_SCHEMA.empty_table()


def _read_source(objects: Objects, source: ProductionSource) -> pa.Table:
    table = read_row_files(
        objects,
        [source.path],
        columns=["superstep", "productions"],
        interval=source.interval,
        keeps_cells=True,
    )
    wanted = table.column("superstep").to_numpy() == source.superstep
    wanted &= table.column("productions").is_valid().to_numpy()
    return source.current(
        flatten_productions(table if wanted.all() else table.filter(pa.array(wanted, pa.bool_())))
    )


def summarise_productions(
    productions: pa.Table, percentiles: Collection[float] = ()
) -> tuple[ProductionSummary, ...]:
    """Return the number of productions per stream and the oldest time, which holds the watermark."""
    by_percentile: dict[str, PercentileTimes] = {}
    if percentiles:
        streams, at = productions.column("stream"), productions.column("at").cast(pa.int64())
        for stream in pc.unique(streams).to_pylist():
            by_percentile[stream] = oldest_but(at.filter(pc.equal(streams, stream)).to_numpy(), percentiles)
    grouped = productions.group_by("stream", use_threads=False).aggregate([("at", "min"), ("at", "count")])
    return tuple(
        ProductionSummary(
            stream=stream,
            count=count,
            oldest_at=EventTimeMicros(oldest),
            percentile_oldest_at=by_percentile.get(stream, {}),
        )
        for stream, oldest, count in zip(
            grouped.column("stream").to_pylist(),
            grouped.column("at_min").cast(pa.int64()).to_pylist(),
            grouped.column("at_count").to_pylist(),
            strict=True,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """A stream's records under one consumer's keys; a key is null exactly where ``errors`` has its position."""

    deliveries: Deliveries
    errors: Mapping[int, str]


def deliveries_of(productions: pa.Table, node: ComputationNode) -> tuple[Extracted, ...]:
    """Return the part of ``productions`` for a computation, per subscribed stream, under the computation's keys."""
    extracted_streams = []
    for stream, part, extracted in keyed_productions(productions, node):
        deliveries = deliveries_in(part.set_column(1, "key", extracted.keys), stream)
        extracted_streams.append(Extracted(deliveries=deliveries, errors=extracted.errors))
    return tuple(extracted_streams)


def keyed_productions(
    productions: pa.Table, node: ComputationNode
) -> Iterator[tuple[str, pa.Table, KeyTexts]]:
    """Yield the part of ``productions`` for a computation: stream, productions, and their keys in the computation."""
    streams = productions.column("stream")
    for subscription in node.subscriptions:
        part = productions.filter(_is_for(node, subscription.stream, streams)).combine_chunks()
        if part.num_rows:
            yield subscription.stream, part, _keys_in(part, subscription.key)


def _keys_in(productions: pa.Table, extractor: KeyExtractor) -> KeyTexts:
    values = values_of(productions)
    # Columns hold no panes.
    inner = extractor.extractor if isinstance(extractor, PaneKey) else extractor
    if isinstance(values, ArrowValues) and inner is not None and not callable(inner):
        # Without the column, each record gets a letter below.
        with suppress(InvalidError):
            return extract_key_column(inner, pa.Table.from_struct_array(values.columns))
    return extract_keys(extractor, one_array(productions.column("key")), values.value)


def deliveries_in(keyed: pa.Table, stream: str) -> Deliveries:
    """Return productions with the columns of `PRODUCTION_SCHEMA`, under their consumer's keys, as deliveries."""
    return Deliveries(
        stream=stream,
        keys=one_array(keyed.column("key")),
        at=one_array(keyed.column("at")).cast(pa.int64()).to_numpy(zero_copy_only=False),
        values=values_of(keyed),
    )


def _is_for(node: ComputationNode, stream: str, streams: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.is_in(streams, pa.array([stream, addressed(stream, node.name)], pa.string()))


def positions_within(
    productions: pa.Table, node: ComputationNode, interval: Interval
) -> npt.NDArray[np.int64]:
    """Return the positions of the productions that a computation gets in ``interval``."""
    streams = productions.column("stream")
    mine = [
        np.flatnonzero(_is_for(node, subscription.stream, streams).to_numpy())
        for subscription in node.subscriptions
    ]
    chosen_rows = [indices for indices in mine if len(indices)]
    chosen = []
    for indices, extracted in zip(chosen_rows, deliveries_of(productions, node), strict=True):
        inside = _inside(extracted.deliveries.keys, interval)
        chosen.append(indices[inside])
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def weak_only(productions: pa.Table) -> pa.Table:
    """Return the productions kept only for a task in the same superstep, under their original streams."""
    mark = addressed("")
    streams = productions.column("stream")
    chosen = productions.filter(pc.ends_with(streams, mark))
    names = pc.replace_substring(chosen.column("stream"), mark, "")
    return chosen.set_column(0, PRODUCTION_SCHEMA.field(0), names)


def keys_of(productions: pa.Table, node: ComputationNode) -> pa.Array:
    columns = [extracted.deliveries.keys.drop_null() for extracted in deliveries_of(productions, node)]
    return pa.concat_arrays(columns) if columns else pa.array([], pa.string())


def within(deliveries: Deliveries, interval: Interval) -> Deliveries | None:
    chosen = np.flatnonzero(_inside(deliveries.keys, interval))
    if len(chosen) == len(deliveries.keys):
        return deliveries
    return take(deliveries, chosen) if len(chosen) else None


def _inside(keys: pa.Array, interval: Interval) -> npt.NDArray[np.bool_]:
    if not interval.low and interval.high is None:
        is_key: npt.NDArray[np.bool_] = keys.is_valid().to_numpy(zero_copy_only=False)
        return is_key
    mask = pc.greater_equal(keys, interval.low)
    if interval.high is not None:
        mask = pc.and_(mask, pc.less(keys, interval.high))
    is_matching: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return is_matching


def keyless_letters(computation: str, extracted: Extracted) -> tuple[DeadLetter, ...]:
    deliveries = extracted.deliveries
    return tuple(
        DeadLetter.of_unreadable(
            computation,
            deliveries.stream,
            partial(deliveries.values.value, row),
            error,
            at=int(deliveries.at[row]),
        )
        for row, error in extracted.errors.items()
    )


def take(deliveries: Deliveries, chosen: npt.NDArray[np.int64]) -> Deliveries:
    return Deliveries(
        stream=deliveries.stream,
        keys=deliveries.keys.take(pa.array(chosen)),
        at=deliveries.at[chosen],
        values=deliveries.values.take(chosen),
        ids=None if deliveries.ids is None else deliveries.ids.take(pa.array(chosen)),
    )


def addresses_of(node: ComputationNode) -> frozenset[str]:
    """Return the streams under which weak productions are kept for a computation in another task."""
    return frozenset([addressed(subscription.stream) for subscription in node.subscriptions])


class UndeliveredProductions:
    """The productions that one superstep delivers; each file is read once, and each consumer extracts keys once.

    ``handed_on`` are uncommitted files of this superstep, with weak productions.
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
        """Read all committed files now instead of when a consumer first needs them."""
        for source in self._sources:
            self._table(source)

    def extracted(self, node: ComputationNode) -> tuple[Extracted, ...]:
        if not self._sources and not self._handed_on:
            return ()
        if node.name not in self._extracted:
            addresses, inbox = addresses_of(node), node.inbox
            tables = [self._table(source) for source in self._sources if source.concerns(inbox)]
            handed_on = (source for source in self._handed_on if source.concerns(addresses))
            tables += [weak_only(self._table(source)) for source in handed_on]
            self._extracted[node.name] = deliveries_of(join_productions(tables), node) if tables else ()
        return self._extracted[node.name]

    def deliveries(self, node: ComputationNode, interval: Interval) -> list[Deliveries]:
        parts = [within(extracted.deliveries, interval) for extracted in self.extracted(node)]
        return [part for part in parts if part is not None]

    def letters(self, node: ComputationNode) -> list[DeadLetter]:
        """Return a dead letter for each record from which the computation's key extractor got no key."""
        return [
            letter
            for extracted in self.extracted(node)
            if extracted.errors
            for letter in keyless_letters(node.name, extracted)
        ]

    def _table(self, source: ProductionSource) -> pa.Table:
        if source not in self._tables:
            self._tables[source] = self._read(source)
        return self._tables[source]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingProductions:
    """The productions of the last superstep that are not delivered.

    Attributes:
        sources: the files for computations, and ``for_sinks`` those for sinks.
        summaries: the number and age of what waits for computations, by stream.
    """

    sources: tuple[ProductionSource, ...] = ()
    for_sinks: tuple[ProductionSource, ...] = ()
    summaries: Mapping[str, ProductionSummary] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of productions that wait for computations."""
        return sum([one.count for one in self.summaries.values()])


def merged_pending(
    sources: Iterable[ProductionSource], summaries: Iterable[ProductionSummary], topology: Topology
) -> PendingProductions:
    """Return what waits for computations and for sinks, from all files of a superstep and the summaries of their productions."""
    merged: dict[str, ProductionSummary] = {}
    for summary in summaries:
        if summary.stream not in topology.consumers:
            continue
        known = merged.get(summary.stream)
        if known is None:
            merged[summary.stream] = summary
            continue
        merged[summary.stream] = ProductionSummary(
            stream=known.stream,
            count=known.count + summary.count,
            oldest_at=min(known.oldest_at, summary.oldest_at),
            # The same share is left out of each part, so at most the same share of the whole.
            percentile_oldest_at={
                percentile: min(at, summary.percentile_oldest_at.get(percentile, summary.oldest_at))
                for percentile, at in known.percentile_oldest_at.items()
            },
        )
    sources = tuple(sources)
    return PendingProductions(
        sources=tuple(source for source in sources if source.concerns(topology.consumers)),
        for_sinks=tuple(source for source in sources if source.concerns(topology.sinks_by_stream)),
        summaries=merged,
    )
