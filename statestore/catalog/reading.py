"""Readers: keep a table version readable for as long as it is read, whatever the retention.

A reader publishes its version in the catalog. A collector looks up there how far it may go, publishes its
own horizon before it deletes, and is refused if that contradicts a reader's. A reader that comes after the
collector is refused instead (`millpond.statestore.catalog.pins`). The horizon of a dead reader expires
after `READER_LIFETIME_MS`; a live reader renews its horizon several times within that time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from millpond.statestore.app_ids import savepoints_of
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.closeable import Closeable
from millpond.statestore.errors import ConflictError, MillpondError, UnavailableError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import TableVersion

READER_LIFETIME_MS: Final = 15 * 60 * 1_000
"""Lifetime of a reader's horizon without renewal, in milliseconds."""

_RENEWALS: Final = 5
_PIN_TRIES: Final = 5
_LOG = logging.getLogger("millpond")


class Reading(Closeable):
    """A version that is being read: published on construction, withdrawn by `close`.

    Args:
        catalog: the catalog to publish in.
        holder: a name that no other reader has.
        version: the table version.

    Raises:
        ConflictError: the version is already being collected.
        UnavailableError: the catalog is unavailable.
    """

    def __init__(self, catalog: Catalog, holder: str, version: TableVersion) -> None:
        self.version = version
        self._catalog = catalog
        self._holder = holder
        self._ended = threading.Event()
        self._lost: MillpondError | None = None
        self.renew()
        self._thread = threading.Thread(target=self._renew_regularly, name="millpond-reading", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Keep the version for another `READER_LIFETIME_MS`; a background thread calls this regularly.

        Raises:
            ConflictError: the horizon expired, and the version is being collected.
            UnavailableError: the catalog is unavailable.
        """
        self._catalog.publish_horizon(self._holder, self.version, lifetime_ms=READER_LIFETIME_MS)

    def check(self) -> None:
        """Raise the error that ended the pin, if there was one: files of the version may be deleted.

        Raises:
            ConflictError: the horizon expired, and the version is being collected.
        """
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """Withdraw the horizon, so that the version may be collected; closing again does nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            self._catalog.withdraw_horizon(self._holder)
        except UnavailableError as error:
            _LOG.info("a reader's horizon is left to expire: %s", error)

    def _renew_regularly(self) -> None:
        while not self._ended.wait(READER_LIFETIME_MS / _RENEWALS / 1_000):
            try:
                self.renew()
            except ConflictError as error:
                self._lost = error
                _LOG.warning("a version that is being read is being collected: %s", error)
                return
            except MillpondError as error:
                _LOG.info("a reader's horizon was not renewed: %s", error)


def pinned_snapshot(
    load: Callable[[int | None], Snapshot],
    catalog: Catalog | None,
    holder: str,
    version: int | None,
    resources: ExitStack,
) -> Snapshot:
    """A table version, pinned until the resources are closed; that of a savepoint needs no pin.

    Args:
        load: loads a version, or the newest one.
        catalog: the catalog to pin it in; ``None`` pins nothing.
        holder: a name that no other reader has.
        version: the version; ``None`` for the newest.
        resources: closes the pin.

    Raises:
        ConflictError: the version is being collected.
        DataError: the log is damaged or does not reach back that far.
    """
    for _ in range(_PIN_TRIES):
        snapshot = load(version)
        if catalog is None:
            return snapshot
        try:
            resources.enter_context(Reading(catalog, holder, snapshot.version))
        except ConflictError:
            if version is not None:
                if version in {kept for _, kept in savepoints_of(load(None).txns)}:
                    return snapshot
                raise
            # The version was the newest when it was loaded but is being collected now: load a newer one.
            continue
        except MillpondError as error:
            # A read-only disk, for example: reading must still work, for as long as the retention lasts.
            _LOG.info("no version is pinned for this reader: %s", error)
        return snapshot
    raise ConflictError("versions are collected faster than they are read", version=version)
