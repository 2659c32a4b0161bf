"""The boundary of the log: commit files below it may be deleted, and puts below it do not count.

A writer wins a version by putting its commit file where there is none. A cleanup deletes commit
files, and so frees old versions again: a writer that slept through the cleanup would win a version
that all others have passed, in a part of the log that no reader looks at. So a cleanup publishes
its boundary before it deletes, and every writer checks the boundary after its put: a file below it
is no commit. This relies on no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millpond.statestore.objects.published_version import publish_version, published_version
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.types import Objects

BOUNDARY_FOLDER: Final = "_millpond/log_boundary"

_SAYS: Final = b"Commits below this version may be deleted; nothing that is put below it counts.\n"


def log_boundary(objects: Objects) -> TableVersion:
    """The version below which commit files may be deleted; 0 before the first cleanup.

    Raises:
        UnavailableError: the store is unavailable.
    """
    return published_version(objects, BOUNDARY_FOLDER)


def publish_log_boundary(objects: Objects, version: TableVersion) -> None:
    """Announce that commits below ``version`` may be deleted; call it before the first deletion.

    A boundary lower than the published one changes nothing.

    Raises:
        UnavailableError: the store is unavailable; the boundary may or may not be published.
    """
    publish_version(objects, BOUNDARY_FOLDER, version, _SAYS)
