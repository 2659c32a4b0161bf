"""Which shared files are parted next, and the parting that is being prepared.

After a split both parts read the files of the interval that was split. Once each part has got some files of its own
the shared ones are rewritten, one stretch at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from millpond.executor.maintenance.compaction import CompactionSchedule
from millpond.executor.maintenance.policy import UpkeepPolicy, UpkeepWorkers
from millpond.executor.ownership.cuts import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.gc.compaction import Compacted
from millpond.gc.parting import Parted, Parting, plan_parting
from millpond.statestore.errors import DataError, UnavailableError
from millpond.statestore.store import Store
from millpond.statestore.types import EventTimeMicros, Superstep

_LOG = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True)
class _InPreparation:
    parting: Parting
    pieces: tuple[Future[Compacted], ...]


class PartingSchedule:
    """The partings of one pipeline: it has them prepared, and its caller commits them.

    Args:
        store: the open store.
        ownership: the intervals.
        compactions: prepares the pieces.
        policy: when and how.
        workers: where they are prepared.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        compactions: CompactionSchedule,
        *,
        policy: UpkeepPolicy,
        workers: UpkeepWorkers,
    ) -> None:
        self._store = store
        self._ownership = ownership
        self._compactions = compactions
        self._policy = policy.compaction
        self._workers = workers
        self._due_after: dict[str, int] = {}
        self._in_preparation: _InPreparation | None = None
        self._superstep = Superstep(0)

    @property
    def computations(self) -> Collection[str]:
        """The computations of which a parting is being prepared or waits for its commit."""
        if self._in_preparation is None:
            return ()
        return {part.interval.computation for part in self._in_preparation.parting.parts}

    def open(self) -> None:
        """Look for files that earlier runs have left to intervals which are no more."""
        snapshot = self._store.committer.snapshot
        live = {owned.interval.app_id for owned in self._ownership.all()}
        for computation in {owned.interval.computation for owned in self._ownership.all()}:
            if any(file.interval_id not in live for file in snapshot.files_in(computation)):
                self._due_after[computation] = 0

    def follow(self, cut: Cut) -> None:
        """Note that the keys of a computation were cut: its files are parted once each part has some of its own."""
        if cut.kind == "split":
            self._due_after[cut.by[0].computation] = self._superstep + self._policy.fan_in

    def update(self) -> None:
        """Note that the pipeline has changed, and with it the intervals."""
        self._due_after.clear()
        self.open()

    def start(
        self,
        superstep: Superstep,
        watermark: Callable[[str], EventTimeMicros],
        *,
        during_round: bool,
    ) -> None:
        """Have the next parting prepared, if one is due and none is under way.

        Args:
            superstep: the last one committed.
            watermark: input low watermark by computation.
            during_round: whether garbage is being collected, which would take a new file for an orphan.
        """
        self._superstep = superstep
        if self._in_preparation is not None:
            return
        for computation in [name for name, at in self._due_after.items() if at <= superstep]:
            live = [owned.interval for owned in self._ownership.of(computation)]
            files = self._store.committer.snapshot.files_in(computation)
            parting = plan_parting(files, live, before=superstep)
            if parting is None:
                # What is not settled yet, or mixed by another engine, is looked at again; else nothing is left to do.
                known = {interval.app_id for interval in live}
                if all(file.interval_id in known for file in files):
                    del self._due_after[computation]
                else:
                    self._due_after[computation] = superstep + self._policy.fan_in
                continue
            is_large = parting.size_bytes > self._policy.memory_bytes_max
            worker = self._workers.large if is_large else self._workers.small
            if not during_round or self._workers.does_rounds(worker):
                pieces = tuple(
                    self._compactions.prepare(worker, part, superstep, watermark) for part in parting.parts
                )
                self._in_preparation = _InPreparation(parting, pieces)
                return

    def take_ready(self) -> Parted | None:
        """The parting that is prepared and still fits the table; the caller's from now on."""
        prepared = self._in_preparation
        if prepared is None or not all(future.done() for future in prepared.pieces):
            return None
        self._in_preparation = None
        try:
            pieces = tuple(future.result() for future in prepared.pieces)
        except (DataError, UnavailableError) as error:
            _LOG.info("files could not be parted: %s", error)
            self._discard(prepared.pieces)
            for part in prepared.parting.parts:
                self._due_after[part.interval.computation] = self._superstep + self._policy.files_max
            return None
        snapshot = self._store.committer.snapshot
        held = {owned.interval for owned in self._ownership.all()}
        is_current = all(part.interval in held for part in prepared.parting.parts) and all(
            snapshot.file(file.path) is not None for file in prepared.parting.files
        )
        if is_current:
            return Parted(parting=prepared.parting, pieces=pieces)
        self._discard(prepared.pieces)
        return None

    def close(self) -> None:
        """Discard what was prepared and not committed; the workers have been shut down."""
        if self._in_preparation is not None:
            self._discard(self._in_preparation.pieces)
            self._in_preparation = None

    def _discard(self, pieces: Collection[Future[Compacted]]) -> None:
        for future in pieces:
            self._compactions.discard_result(future)
