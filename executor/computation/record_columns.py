"""
A bundle's records in columns, and the input time that their productions go by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.executor.computation.values import Values

__all__ = ["HookEnd", "InputTime", "RecordColumns"]


class InputTime:
    """
    The event time of the input that user code is busy with.

    Attributes:
        at: default time of what is produced.
        floor_at: nothing may be produced below it (§4.5: no smaller than any source record).
        slack_us: unless the computation may go so far below it.
    """

    __slots__ = ("at", "floor_at", "slack_us")

    def __init__(self) -> None:
        self.at = 0
        self.floor_at = 0
        self.slack_us = 0

    def of_one(self, at: int) -> None:
        """
        One record or timer.
        """
        self.at = self.floor_at = at


class HookEnd(Protocol):
    """
    Told when user code is done with one record.
    """

    def end_hook(self) -> None:
        """
        The hook has returned.
        """
        ...


class RecordColumns:
    """
    A bundle's records, column by column, sorted by key, then time, then arrival.

    Args:
        at: event times.
        streams: the streams they came on.
        sources: positions in ``values`` and ``ids``.
        values: values in order of arrival.
        ids: ids in order of arrival, if there are any.
        watermark: records below it are late.

    Attributes:
        values_are_wanted: user code has asked for a value, so it will ask for others: from
            then on they are decoded at once, which is cheaper than on demand.
    """

    __slots__ = ("_ids", "at", "read", "sources", "streams", "values_are_wanted", "watermark")

    def __init__(
        self,
        at: npt.NDArray[np.int64],
        streams: Sequence[str],
        sources: npt.NDArray[np.int64],
        values: Values,
        ids: pa.Array | None,
        watermark: int,
    ) -> None:
        self.at: list[int] = at.tolist()
        self.streams = streams
        self.watermark = watermark
        self.sources: list[int] = sources.tolist()
        self.read = values.value
        self.values_are_wanted = False
        self._ids = ids

    def value(self, index: int) -> Any:
        """
        The decoded value of the record at ``index``.
        """
        return self.read(self.sources[index])

    def id(self, index: int) -> bytes | None:
        """
        The id of the record at ``index``, as its publisher gave it.
        """
        found: bytes | None = None if self._ids is None else self._ids[self.sources[index]].as_py()
        # Where streams share a computation, their names keep their ids apart: `Topology.id_scope`.
        return None if found is None else found.removeprefix(f"{self.streams[index]}\0".encode())
