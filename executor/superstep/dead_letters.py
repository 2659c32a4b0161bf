"""The dead letters of a run: judged before the commit, written with it, and given once more if that is asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millpond.executor.bundle.bundle import DeadLetter
from millpond.executor.bundle.result import Manifest
from millpond.executor.dead_letters.dead_letter import WrittenLetters, write_dead_letters
from millpond.executor.dead_letters.dead_letter_limit import DeadLetterLimit, DeadLetterMonitor, Tallies
from millpond.executor.dead_letters.letter_retries import LetterRetries
from millpond.executor.pipeline.topology import Topology
from millpond.executor.superstep.plan import SuperstepPlan
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.types import Clock

_LOG: Final = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True)
class LettersOfSuperstep:
    """What a superstep does to dead letters.

    Attributes:
        new: those that it writes.
        settled: the names of those that it deletes, because they were retried or dropped.
        tallies: how much of each computation's work failed.
    """

    new: Sequence[DeadLetter]
    settled: frozenset[str]
    tallies: Tallies


class DeadLetters:
    """The dead letters of one pipeline.

    Args:
        store: the open store.
        topology: the checked pipeline.
        clock: the source of time.
        limit: how much may become dead letters before the run stops; ``None``: all of it.
        id_scope: returns the prefix of record ids, by computation and stream.

    Attributes:
        retries: those that are given once more.
    """

    def __init__(
        self,
        store: Store,
        topology: Topology,
        clock: Clock,
        limit: DeadLetterLimit | None,
        id_scope: Callable[[str, str], bytes],
    ) -> None:
        self._store = store
        self._topology = topology
        self._monitor = DeadLetterMonitor(limit)
        self.retries: LetterRetries = LetterRetries(store, topology, clock, id_scope)

    def judge(self, manifests: Sequence[Manifest], unreadable: Sequence[DeadLetter]) -> LettersOfSuperstep:
        """The letters of a superstep that is about to be committed.

        Args:
            manifests: the intervals that ran.
            unreadable: the letters of records that never reached an interval.

        Raises:
            InvalidError: too much of the superstep became dead letters.
        """
        tallies = self._monitor.check(manifests, unreadable)
        new = [*unreadable, *(letter for manifest in manifests for letter in manifest.result.dead_letters)]
        return LettersOfSuperstep(new, self.retries.settled(manifests), tallies)

    def write(
        self, letters: LettersOfSuperstep, plan: SuperstepPlan, fence: Fence, token: str
    ) -> WrittenLetters:
        """Write new letters, and that others are deleted, to an uncommitted row file.

        Args:
            letters: the letters.
            plan: the superstep.
            fence: the fence of the commit that will add the file.
            token: makes the file's name unique.

        Raises:
            UnavailableError: the store is unavailable.
        """
        return write_dead_letters(
            self._store,
            self._topology,
            letters.new,
            settled=letters.settled,
            superstep=plan.superstep,
            fence=fence,
            at=plan.wall_time,
            token=token,
        )

    def note(self, letters: LettersOfSuperstep) -> None:
        """The superstep of these letters was committed."""
        self._monitor.note(letters.tallies)
        failed = sum(letter.retried > 0 for letter in letters.new)
        if failed:
            _LOG.warning("%d of %d dead letters that were retried failed again", failed, len(letters.settled))
        self.retries.note(letters.settled)

    def answer(self, record: Callable[[Mapping[str, int]], None]) -> None:
        """Say which requests have no letter left; see `LetterRetries.answer`."""
        self.retries.answer(record)
