"""Arrivals: the concatenated deliveries of a bundle, column by column, in order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.bundle.bundle import Deliveries
from millpond.executor.computation.values import ConcatenatedValues, PythonValues, Values
from millpond.statestore.check import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """The records of a bundle.

    Attributes:
        keys: the consumer's keys.
        at: event times.
        values: the values.
        ids: ids of outside records; ``None`` when no record has one.
        streams: the names of the streams, one per delivery.
        counts: how many records each delivery has.
    """

    keys: pa.StringArray
    at: npt.NDArray[np.int64]
    values: Values
    ids: pa.BinaryArray | None
    streams: Sequence[str]
    counts: Sequence[int]

    def __len__(self) -> int:
        return len(self.at)

    @staticmethod
    def of(deliveries: Sequence[Deliveries], *, with_ids: bool) -> Arrivals:
        """Concatenate deliveries.

        Args:
            deliveries: any number of deliveries, which may be empty.
            with_ids: whether to keep the record ids.
        """
        some = [delivery for delivery in deliveries if len(delivery.at)]
        for delivery in some:
            sizes = {len(delivery.keys), len(delivery.at), len(delivery.values)}
            check(len(sizes) == 1, "the columns of a delivery have one length", stream=delivery.stream)
            check(not delivery.keys.null_count, "delivered records have keys", stream=delivery.stream)
        return Arrivals(
            keys=_joined([_as(delivery.keys, pa.string()) for delivery in some], pa.string()),
            at=_times([delivery.at for delivery in some]),
            values=_values([delivery.values for delivery in some]),
            ids=_ids(some) if with_ids else None,
            streams=[delivery.stream for delivery in some],
            counts=[len(delivery.at) for delivery in some],
        )

    def streams_of(self, sources: npt.NDArray[np.int64]) -> Sequence[str]:
        """The streams of the records at the indices ``sources``."""
        if len(self.streams) <= 1:
            return [*self.streams] * len(sources)
        names = np.repeat(np.array(self.streams, dtype=object), self.counts)
        stream_names: list[str] = names[sources].tolist()
        return stream_names


def _joined(arrays: list[pa.Array], kind: pa.DataType) -> pa.Array:
    if len(arrays) == 1:
        return arrays[0]
    return pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _as(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if array.type == kind else array.cast(kind)


def _times(times: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    if len(times) == 1:
        return times[0]
    return np.concatenate(times) if times else np.empty(0, np.int64)


def _values(values: list[Values]) -> Values:
    if len(values) == 1:
        return values[0]
    return ConcatenatedValues(values) if values else PythonValues([])


def _ids(deliveries: list[Deliveries]) -> pa.BinaryArray | None:
    if all(delivery.ids is None for delivery in deliveries):
        return None
    ids = [
        pa.nulls(len(delivery.at), pa.binary()) if delivery.ids is None else _as(delivery.ids, pa.binary())
        for delivery in deliveries
    ]
    joined = _joined(ids, pa.binary())
    return None if joined.null_count == len(joined) else joined
