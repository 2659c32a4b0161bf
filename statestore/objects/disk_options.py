"""Whether a machine's processes keep row files on its disk, where, and how many."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millpond.statestore.objects.disk_folder import DiskFolder
from millpond.statestore.objects.disk_tier import DiskTier
from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.types import Clock, Objects

_LOG = logging.getLogger("millpond")

DEFAULT_DISK_BYTES: Final = 8 << 30
"""The budget of a machine, where the disk has room for ten times as much."""

_FREE_SHARE: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """What was asked for; each machine makes of it what its disk has room for.

    Attributes:
        budget_bytes: the budget of a machine; 0 for no tier, ``None`` for the default.
        folder: where; ``None`` for a folder of this user in the system's temporary folder.
    """

    budget_bytes: int | None = None
    folder: str | None = None

    def tier_of(self, objects: Objects, clock: Clock, *, below: Objects | None = None) -> Objects:
        """A store with the disk tier before it, or the store as it is.

        By default only a store on an object store gets one: that of a local folder would copy the disk to itself.

        Args:
            objects: the store.
            clock: the source of time.
            below: what the tier reads, if not the store itself: the store in a wrapper.
        """
        lower = objects if below is None else below
        is_asked_for = self.folder is not None or self.budget_bytes is not None
        if self.budget_bytes == 0 or not (is_asked_for or isinstance(objects, ObstoreObjects)):
            return lower
        try:
            folder = self._folder()
            budget_bytes = _default_bytes(folder) if self.budget_bytes is None else self.budget_bytes
        except OSError as error:
            _LOG.warning(
                "there is no folder for the disk tier, and row files are read from the store: %s", error
            )
            return lower
        return DiskTier(lower, DiskFolder(folder, budget_bytes, clock), clock)

    def _folder(self) -> Path:
        if self.folder is not None:
            return Path(self.folder).resolve()
        return Path(tempfile.gettempdir()) / f"millpond-{os.getuid()}"


def _default_bytes(folder: Path) -> int:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return min(DEFAULT_DISK_BYTES, shutil.disk_usage(there).free // _FREE_SHARE)
