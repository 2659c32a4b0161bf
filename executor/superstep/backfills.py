"""Backfills: the history that a computation gets before any record of its streams.

Each computation's progress in its history is a position in the commit that stores the effects, so each record counts
once, however often the process dies. Until the history is complete, the computation's input watermark is held back at
the oldest time still to come. The position also records that a computation has joined: a computation that ran before
it declared a ``backfill`` has no position, and is refused because it would count its former records twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from millpond.executor.ownership.ownership import Ownership
from millpond.executor.pipeline.topology import Topology
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store
from millpond.statestore.types import TIME_MIN_US, EventTimeMicros

_BEGINNING = EventTimeMicros(TIME_MIN_US)


def backfill_position(consumed: int, *, is_all: bool) -> int:
    """Return the stored form of the number of consumed records; it is odd once all are consumed.

    Example:
        >>> backfill_position(7, is_all=False), backfill_position(7, is_all=True)
        (14, 15)
    """
    return 2 * consumed + is_all


class Backfills:
    def __init__(
        self, store: Store, topology: Topology, ownership: Ownership, watermarks: PipelineWatermarks
    ) -> None:
        self._store = store
        self._topology = topology
        self._ownership = ownership
        self._watermarks = watermarks

    def open(self) -> None:
        """Hold the watermarks of computations whose history is incomplete; call it before the watermarks are restored."""
        for name in self._topology.backfills:
            has_joined = any(position is not None for position in self._positions(name).values())
            if not has_joined and self._ownership.of(name):
                self._ownership.close()
                raise InvalidError(
                    "the computation has run, or was loaded, without its backfill, which would count twice what it "
                    "has: remove backfill=, or start a computation of another name",
                    pipeline=self._topology.name,
                    computation=name,
                )
        for name in self.pending:
            self._watermarks.hold_back(name, _BEGINNING)

    def refuse_pending(self) -> None:
        """Refuse a change of a running pipeline that adds a history to read."""
        for name in self.pending:
            raise InvalidError(
                "a running pipeline cannot give a computation its backfill: stop it, and start it with the change",
                pipeline=self._topology.name,
                computation=name,
            )

    @property
    def pending(self) -> tuple[str, ...]:
        names = self._topology.backfills
        return tuple(name for name in names if any(left is not None for left in self.consumed(name).values()))

    def consumed(self, computation: str) -> dict[str, int | None]:
        """Return how many records of its history a computation has consumed, by stream; ``None``: all."""
        return {
            stream: 0 if position is None or position < 0 else None if position % 2 else position // 2
            for stream, position in self._positions(computation).items()
        }

    def offsets(self, computation: str, stream: str) -> str | None:
        """Return what was recorded about the consumed part of a history."""
        return self._store.committer.snapshot.source_offsets.get(self._app_id(computation, stream))

    def join(self, computation: str) -> None:
        """Record that a computation begins with its history, before it has intervals."""
        wanted = {
            self._app_id(computation, stream): 0
            for stream, position in self._positions(computation).items()
            if position is None or position < 0
        }
        if wanted:
            self._ownership.record(wanted)

    def hold(self, computation: str, at: EventTimeMicros) -> None:
        """Move a computation's held watermark to the oldest time still to come, so that earlier timers fire."""
        self._watermarks.hold_back(computation, at)

    def end(self, computation: str, streams: Mapping[str, int]) -> None:
        """Let a computation follow its streams, because its history is complete.

        Of ``streams``, with their numbers of consumed records, no superstep could record the end: no history was left.
        """
        rest = {
            self._app_id(computation, stream): backfill_position(consumed, is_all=True)
            for stream, consumed in streams.items()
        }
        if rest:
            self._ownership.record(rest)
        self._watermarks.hold_back(computation, None)

    def _positions(self, computation: str) -> dict[str, int | None]:
        positions = self._store.committer.snapshot.txns
        return {
            stream: positions.get(self._app_id(computation, stream))
            for stream in self._topology.backfills[computation]
        }

    def _app_id(self, computation: str, stream: str) -> str:
        return AppId.BACKFILL.of(self._topology.name, computation, stream)
