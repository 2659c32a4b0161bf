"""Dead letters that are given to their computations once more, or dropped, because a request says so.

What a superstep retries is chosen when it is planned: some letters of the first request that waits, the oldest first.
Each travels with the plan of the interval that has its key, and the commit of the superstep deletes those that the
manifests name. So it is retried once, whatever happens between request and commit: while its row is there it has not
been, and afterwards no process finds it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from millpond.executor.bundle.result import Manifest
from millpond.executor.bundle.retried_letter import RetriedLetter
from millpond.executor.dead_letters.letter_request import LetterRequest, waiting_letter_requests
from millpond.executor.dead_letters.stored_letter import StoredLetter, stored_letters
from millpond.executor.dead_letters.unread_letter import read_again
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.store import Store
from millpond.statestore.types import Clock

_LOG: Final = logging.getLogger("millpond")
_LOOK_EVERY_US: Final = 1_000_000
"""How often the table is searched for requests: it may have thousands of transactions."""

_RETRIED_MAX: Final = 1_000
"""How many letters a superstep retries: each is run alone, with a savepoint before it."""

_RETRIED_BYTES_MAX: Final = 8 << 20
"""About how large the values may be that travel with the plan of a superstep."""

_DROPPED_MAX: Final = 100_000
"""How many letters a superstep drops: each is a row update."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What one superstep does."""

    retried: Mapping[str, list[RetriedLetter]] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()


class LetterRetries:
    """Honours the requests for one pipeline's dead letters, superstep by superstep.

    Args:
        store: the open store.
        topology: the checked pipeline.
        clock: the source of time.
        id_scope: returns the prefix of record ids, by computation and stream.
    """

    def __init__(
        self, store: Store, topology: Topology, clock: Clock, id_scope: Callable[[str, str], bytes]
    ) -> None:
        self._store = store
        self._topology = topology
        self._clock = clock
        self._id_scope = id_scope
        self._looked_us: int | None = None
        self._request: LetterRequest | None = None
        self._left: dict[str, None] = {}
        self._answers: dict[str, int] = {}
        self._chosen = _Chosen()

    def is_waiting(self) -> bool:
        """Whether a superstep would retry or drop letters; for a pipeline that has nothing else to do.

        It follows the log, but not each time, and not while the store is away.
        """
        if self._is_time_to_look():
            try:
                self._store.committer.refresh()
                self._look()
            except UnavailableError as error:
                _LOG.debug("no request for dead letters can be read now: %s", error)
        return bool(self._left)

    def choose(self) -> None:
        """Choose what the superstep that is being planned retries and drops; what was chosen before is forgotten.

        Raises:
            DataError: a file with letters is missing or damaged.
            UnavailableError: the store is unavailable.
        """
        self._chosen = _Chosen()
        if self._is_time_to_look():
            self._look()
        if self._left and self._request is not None:
            self._chosen = self._next(self._request)

    def computations(self) -> Mapping[str, list[str]]:
        """The computations whose letters the superstep retries, each with the letters' keys."""
        return {name: [letter.key for letter in letters] for name, letters in self._chosen.retried.items()}

    def of(self, interval: Interval) -> tuple[RetriedLetter, ...]:
        """The letters that an interval gets."""
        letters = self._chosen.retried.get(interval.computation, ())
        return tuple(letter for letter in letters if interval.contains(letter.key))

    def settled(self, manifests: Iterable[Manifest]) -> frozenset[str]:
        """The letters that the commit of these manifests deletes: those that ran, and those that are dropped."""
        return self._chosen.dropped.union(*(manifest.result.retried for manifest in manifests))

    def note(self, settled: Iterable[str]) -> None:
        """A superstep was committed that has deleted these letters."""
        self._chosen = _Chosen()
        for name in settled:
            self._left.pop(name, None)
        if self._request is not None and not self._left:
            self._answers |= self._request.answer
            self._request = None
            # The next request does not wait for its turn to be looked for.
            self._looked_us = None

    def answer(self, record: Callable[[Mapping[str, int]], None]) -> None:
        """Say which requests have no letter left.

        Args:
            record: commits positions.

        Raises:
            FencedError: another process owns the pipeline.
        """
        answers, self._answers = self._answers, {}
        if not answers:
            return
        try:
            record(answers)
        except ConflictError as error:
            # Asked for again meanwhile: it still waits, and is looked at again.
            _LOG.debug("a request for dead letters was repeated while it was answered: %s", error)

    # -- requests --------------------------------------------------------------------------

    def _is_time_to_look(self) -> bool:
        now_us = self._clock.monotonic_us()
        return self._looked_us is None or now_us - self._looked_us >= _LOOK_EVERY_US

    def _look(self) -> None:
        """Find the first request that has letters left; those before it have none, and are answered."""
        waiting = waiting_letter_requests(self._store.committer.snapshot.txns, self._topology.name)
        if self._request is None or waiting[:1] != (self._request,):
            self._request, self._left, self._answers = None, {}, {}
            for request in waiting:
                left = self._meant(request)
                if left:
                    self._request, self._left = request, left
                    break
                self._answers |= request.answer
        self._looked_us = self._clock.monotonic_us()

    def _meant(self, request: LetterRequest) -> dict[str, None]:
        """The names of a request's letters, the oldest first, without those that cannot be retried."""
        names: dict[str, None] = {}
        refused: Counter[str] = Counter()
        for letter in stored_letters(self._store.committer.snapshot, self._store.objects):
            if not request.has(letter):
                continue
            try:
                if request.action == "retry":
                    self._read(letter)
                names[letter.name] = None
            except InvalidError as error:
                refused[error.message] += 1
        for reason, count in refused.items():
            _LOG.warning(
                "%d dead letters stay what they are, because they cannot be retried: %s", count, reason
            )
        return names

    def _read(self, letter: StoredLetter) -> tuple[str, RetriedLetter]:
        """The computation that a letter is for, and what it gets.

        Raises:
            InvalidError: the letter cannot be retried.
        """
        told, topology = letter.fields, self._topology
        name = topology.former_names.get(told["computation"], told["computation"])
        node = topology.computations.get(name)
        if node is None:
            raise InvalidError("the pipeline has no such computation", computation=name)
        stream = topology.current_stream(told["stream"]) if told["stream"] else ""
        told = {**told, "stream": stream}
        if not stream:
            return name, RetriedLetter.read(letter.name, told)
        subscription = node.subscription(stream)
        if subscription is None:
            raise InvalidError("the computation does not consume the stream", computation=name, stream=stream)
        if not letter.is_unread:
            return name, RetriedLetter.read(letter.name, told)
        injector = topology.injectors.get(stream)
        return name, read_again(letter.name, told, node, subscription, injector, self._id_scope)

    # -- letters ---------------------------------------------------------------------------

    def _next(self, request: LetterRequest) -> _Chosen:
        if request.action == "drop":
            return _Chosen(dropped=frozenset(islice(self._left, _DROPPED_MAX)))
        names = list(islice(self._left, _RETRIED_MAX))
        retried: dict[str, list[RetriedLetter]] = {}
        size_bytes = 0
        for stored in stored_letters(self._store.committer.snapshot, self._store.objects, names):
            try:
                computation, letter = self._read(stored)
            except InvalidError as error:
                # It could be read a moment ago: an extractor never does the same twice.
                del self._left[stored.name]
                _LOG.warning("a dead letter stays what it is letter=`%s`: %s", stored.name, error)
                continue
            retried.setdefault(computation, []).append(letter)
            size_bytes += len(letter.value)
            if size_bytes > _RETRIED_BYTES_MAX:
                break
        return _Chosen(retried)
