"""A bundle's records in columns, and the input time that bounds their productions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import Values


class InputTime:
    """The event time of the input that user code is processing, in microseconds.

    Attributes:
        at: the default time of productions.
        floor_at: no production may be before it (MillWheel §4.5: no smaller than any source record) …
        slack_us: … by more than this, which is the computation's late data horizon.
    """

    __slots__ = ("at", "floor_at", "slack_us")

    def __init__(self) -> None:
        self.at: int = 0
        self.floor_at: int = 0
        self.slack_us: int = 0

    def of_one(self, at: int) -> None:
        """Set the time of a single record or timer."""
        self.at = self.floor_at = at


class RecordColumns:
    """A bundle's records, column by column, sorted by key, then time (unless by arrival), then arrival.

    Args:
        at: event times.
        streams: the stream of each record.
        sources: each record's index in ``values`` and ``ids``.
        values: values in order of arrival.
        ids: ids in order of arrival; ``None`` if no record has one.
        watermark: records before it are late.
        by_time: whether the records of a key are sorted by time.

    Attributes:
        values: the values in order of arrival.
        values_are_wanted: user code has read a value and will probably read the others: from then
            on values are decoded when their record is made, which is cheaper than on demand.
    """

    __slots__ = (
        "_ids",
        "at",
        "by_time",
        "read",
        "sources",
        "streams",
        "values",
        "values_are_wanted",
        "watermark",
    )

    def __init__(
        self,
        at: npt.NDArray[np.int64],
        streams: Sequence[str],
        sources: npt.NDArray[np.int64],
        values: Values,
        ids: pa.Array | None,
        watermark: int,
        *,
        by_time: bool = True,
    ) -> None:
        self.by_time: bool = by_time
        self.at: list[int] = at.tolist()
        self.streams: Sequence[str] = streams
        self.watermark: int = watermark
        self.sources: list[int] = sources.tolist()
        self.values: Values = values
        self.read: Callable[[int], Any] = values.value
        self.values_are_wanted: bool = False
        self._ids = ids

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """The least and the greatest time of the records ``start`` to ``stop``, all of one key."""
        at = self.at
        if self.by_time:
            return at[start], at[stop - 1]
        times = at[start:stop]
        return min(times), max(times)

    def value(self, index: int) -> Any:
        """The decoded value of the record at ``index``."""
        return self.read(self.sources[index])

    def scoped_id(self, index: int) -> bytes | None:
        """The id of the record at ``index`` as it is deduplicated."""
        scoped: bytes | None = None if self._ids is None else self._ids[self.sources[index]].as_py()
        return scoped

    def id(self, index: int) -> bytes | None:
        """The id of the record at ``index``, as its publisher gave it."""
        scoped = self.scoped_id(index)
        # Where a computation has several streams, each id has its stream's name in front: `Topology.id_scope`.
        return None if scoped is None else scoped.removeprefix(f"{self.streams[index]}\0".encode())
