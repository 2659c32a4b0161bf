"""Backfills: which computations are still to be given history, and how much of it they have.

A computation with a ``backfill`` that joins a pipeline is given that history, and it alone, before any record of its
streams that comes after it has joined. How much it has consumed is a position like that of an input, in the commit
that stores the effects: so each record of the history counts once, however often the process dies. Until it has all
of it, its input watermark is held back at the oldest time still to come.

Its position also says that a computation has joined: one that ran before it had a ``backfill`` has none, and would
count what it had before a second time, so that is refused.
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
    """How much has been consumed of a history, as the table has it.

    Example:
        >>> backfill_position(7, is_all=False), backfill_position(7, is_all=True)
        (14, 15)
    """
    return 2 * consumed + is_all


class Backfills:
    """The backfills of one pipeline.

    Args:
        store: the open store.
        topology: the checked pipeline.
        ownership: its intervals.
        watermarks: its watermarks.
    """

    def __init__(
        self, store: Store, topology: Topology, ownership: Ownership, watermarks: PipelineWatermarks
    ) -> None:
        self._store = store
        self._topology = topology
        self._ownership = ownership
        self._watermarks = watermarks

    def open(self) -> None:
        """Hold the watermarks of the computations that are still to be given history; call it before these are restored.

        Raises:
            InvalidError: a computation has run without its backfill.
        """
        for name in self._topology.backfills:
            if all(position is None for position in self._positions(name).values()) and self._ownership.of(
                name
            ):
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
        """Refuse a change of a running pipeline by which computations would have to be given history.

        Raises:
            InvalidError: there is such a computation.
        """
        for name in self.pending:
            raise InvalidError(
                "a running pipeline cannot give a computation its backfill: stop it, and start it with the change",
                pipeline=self._topology.name,
                computation=name,
            )

    @property
    def pending(self) -> tuple[str, ...]:
        """The computations that are still to be given history, in the order of their declaration."""
        return tuple(name for name in self._topology.backfills if not self._is_done(name))

    def consumed(self, computation: str) -> dict[str, int | None]:
        """How many records of its history a computation has consumed, by stream; ``None`` of a stream: all of them."""
        return {
            stream: 0 if position is None or position < 0 else None if position % 2 else position // 2
            for stream, position in self._positions(computation).items()
        }

    def join(self, computation: str) -> None:
        """Note that a computation begins with its history, before it has intervals.

        Raises:
            FencedError: another process owns the pipeline.
        """
        wanted = {
            self._app_id(computation, stream): 0
            for stream, position in self._positions(computation).items()
            if position is None or position < 0
        }
        if wanted:
            self._ownership.record(wanted)

    def hold(self, computation: str, at: EventTimeMicros) -> None:
        """Say up to which time a computation has all of its history, so that its timers may fire."""
        self._watermarks.hold_back(computation, at)

    def end(self, computation: str, streams: Mapping[str, int]) -> None:
        """A computation has all of its history: from now on it follows its streams.

        Args:
            computation: its name.
            streams: the streams of whose history nothing was left that a superstep could have consumed, with how much
                was consumed before.
        """
        rest = {
            self._app_id(computation, stream): backfill_position(consumed, is_all=True)
            for stream, consumed in streams.items()
        }
        if rest:
            self._ownership.record(rest)
        self._watermarks.hold_back(computation, None)

    def _is_done(self, computation: str) -> bool:
        return all(consumed is None for consumed in self.consumed(computation).values())

    def _positions(self, computation: str) -> dict[str, int | None]:
        positions = self._store.committer.snapshot.txns
        return {
            stream: positions.get(self._app_id(computation, stream))
            for stream in self._topology.backfills[computation]
        }

    def _app_id(self, computation: str, stream: str) -> str:
        return AppId.BACKFILL.of(self._topology.name, computation, stream)
