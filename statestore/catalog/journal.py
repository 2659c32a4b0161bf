"""The catalog journal: keeps the catalog off the critical path of commits.

Commits submit their facts and continue. A background thread writes all waiting facts in one transaction,
at most one per ``linger_ms``. The queue is bounded: `submit` waits only while it is full. An error of
the writer is raised by the owner's next call; facts that it could not write are dropped, because the
log has them and `Catalog.rebuild` restores them.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import Final

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.entries import CommitFacts
from millpond.statestore.errors import InvalidError
from millpond.statestore.types import Closeable

_FACTS_MAX: Final = 1_024
_LINGER_MS: Final = 100


class _Life(Enum):
    OPEN = "open"
    CLOSING = "closing"


class CatalogJournal(Closeable):
    """A background writer in front of a `Catalog`.

    Args:
        catalog: the catalog to write to; the journal does not close it.
        facts_max: how many commits may wait in the queue.
        linger_ms: how long the writer gathers commits before it writes them.
    """

    def __init__(self, catalog: Catalog, *, facts_max: int = _FACTS_MAX, linger_ms: int = _LINGER_MS) -> None:
        self._catalog = catalog
        self._facts_max = facts_max
        self._linger_s = linger_ms / 1_000
        self._waiting: deque[CommitFacts] = deque()
        self._writing = False
        self._flushing = 0
        self._life = _Life.OPEN
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_batches, name="millpond-catalog", daemon=True)
        self._thread.start()

    def submit(self, facts: CommitFacts) -> None:
        """Queue the facts of a commit; waits only while the queue is full.

        Raises:
            MillpondError: the writer failed since the last call; ``facts`` were queued anyway.
            InvalidError: the journal is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < self._facts_max or not self._is_open)
            if not self._is_open:
                raise InvalidError("the catalog's journal is closed")
            self._waiting.append(facts)
            self._changed.notify_all()
            self._raise_error()

    def flush(self) -> None:
        """Wait until all facts submitted so far are in the catalog.

        Raises:
            MillpondError: the writer failed since the last call.
        """
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting and not self._writing)
            self._flushing -= 1
            self._raise_error()

    def close(self) -> None:
        """Write the waiting facts and stop; closing again does nothing.

        Raises:
            MillpondError: the writer failed since the last call.
        """
        with self._changed:
            self._life = _Life.CLOSING
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._raise_error()

    @property
    def _is_open(self) -> bool:
        return self._life is _Life.OPEN

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_batches(self) -> None:
        while batch := self._next_batch():
            try:
                self._catalog.record_commits(batch)
            except Exception as error:  # noqa: BLE001 - the owner's next call raises it
                self._note_error(error)
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _note_error(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error

    def _next_batch(self) -> tuple[CommitFacts, ...]:
        """Wait for facts and return all of them; empty when the journal is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._is_open)
            self._changed.wait_for(self._is_urgent, timeout=self._linger_s)
            batch = tuple(self._waiting)
            self._waiting.clear()
            self._writing = bool(batch)
            self._changed.notify_all()
            return batch

    def _is_urgent(self) -> bool:
        is_full = len(self._waiting) >= self._facts_max
        return is_full or self._flushing > 0 or not self._is_open
