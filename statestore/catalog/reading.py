"""
A reader: keeps a table version readable for as long as it is read, whatever the retention.

It publishes its version in the catalog; a collector asks there how far it may go, publishes its own
horizon before it deletes, and is refused if that contradicts a reader's. A reader that comes after the
collector is refused instead (`millpond.statestore.catalog.pins`). A reader that dies is forgotten
after `READER_LIFETIME_MS`; one that lives renews its horizon long before.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Final, Self

from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import ConflictError, MillpondError, UnavailableError
from millpond.statestore.types import TableVersion

__all__ = ["READER_LIFETIME_MS", "Reading"]

READER_LIFETIME_MS: Final = 15 * 60 * 1_000
"""How long a reader's horizon holds without being renewed."""

_RENEWALS: Final = 5
_LOG = logging.getLogger("millpond")


class Reading:
    """
    A version that is being read; publishes at once, withdraws at the end of the ``with``.

    Args:
        catalog: where horizons are.
        holder: a name that no other reader has.
        version: the table version.

    Raises:
        ConflictError: the version is being collected already.
        UnavailableError: the catalog is away.
    """

    def __init__(self, catalog: Catalog, holder: str, version: TableVersion) -> None:
        self.version = version
        self._catalog = catalog
        self._holder = holder
        self._ended = threading.Event()
        self._lost: MillpondError | None = None
        self.renew()
        self._thread = threading.Thread(target=self._renew_on, name="millpond-reading", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """
        Hold the version for another `READER_LIFETIME_MS`; happens by itself in a thread.

        Raises:
            ConflictError: it was not renewed for too long, and is being collected.
            UnavailableError: the catalog is away.
        """
        self._catalog.publish_horizon(self._holder, self.version, lifetime_ms=READER_LIFETIME_MS)

    def check(self) -> None:
        """
        Raise what has ended the hold, if something has: files of the version may be gone.

        Raises:
            ConflictError: it was not renewed for too long, and is being collected.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """
        Let the version go; again is the same as once.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self._catalog.withdraw_horizon(self._holder)
        except UnavailableError as error:
            _LOG.info("a reader's horizon is left to expire: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _renew_on(self) -> None:
        while not self._ended.wait(READER_LIFETIME_MS / _RENEWALS / 1_000):
            try:
                self.renew()
            except ConflictError as error:
                self._lost = error
                _LOG.warning("a version that is being read is being collected: %s", error)
                return
            except MillpondError as error:
                _LOG.info("a reader's horizon was not renewed: %s", error)
