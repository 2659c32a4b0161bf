"""
The catalog off the critical path: commits hand over their facts and go on.

A background thread writes everything that has gathered in one transaction, at most one per
``linger_ms``. The queue is bounded: while it is full, `submit` waits for the writer, and no
longer. An error of the writer is raised by the owner's next call; what it could not write is
given up, for the log has it and `Catalog.rebuild` brings it back.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from types import TracebackType
from typing import Final, Self

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.catalog.facts import CommitFacts
from millpond.statestore.errors import InvalidError

__all__ = ["CatalogJournal"]

_FACTS_MAX: Final = 1_024
_LINGER_MS: Final = 100


class _Life(Enum):
    OPEN = "open"
    CLOSING = "closing"


class CatalogJournal:
    """
    A background writer in front of a `Catalog`.

    Args:
        catalog: where to; the journal does not close it.
        facts_max: how many commits may wait.
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
        self._thread = threading.Thread(target=self._write_on, name="millpond-catalog", daemon=True)
        self._thread.start()

    def submit(self, facts: CommitFacts) -> None:
        """
        Hand over what a commit says; waits only while the queue is full.

        Raises:
            MillpondError: the writer failed since the last call; ``facts`` were taken all the same.
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
        """
        Wait until everything handed over so far is in the catalog.

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
        """
        Write what is waiting and stop; again is the same as once.

        Raises:
            MillpondError: the writer failed since the last call.
        """
        with self._changed:
            self._life = _Life.CLOSING
            self._changed.notify_all()
        self._thread.join()
        with self._changed:
            self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _is_open(self) -> bool:
        return self._life is _Life.OPEN

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_on(self) -> None:
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
        """
        Everything that is waiting, once there is something; nothing when it is time to stop.
        """
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
