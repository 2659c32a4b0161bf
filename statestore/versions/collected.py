"""The collected horizon: versions below it may lose their files, unless a savepoint keeps them.

A collector publishes it before it deletes, and looks for savepoints after that. A process that makes a savepoint of an
older version commits it first, and looks at the horizon after that. So in either order one of them sees the other, and
this relies on no clock: either the collector keeps the version, or the savepoint is taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millpond.statestore.objects.published_version import publish_version, published_version
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.types import Objects

HORIZON_FOLDER: Final = "_millpond/collected_horizon"

_SAYS: Final = b"Versions below this one may have lost files, unless a savepoint keeps them.\n"


def collected_horizon(objects: Objects) -> TableVersion:
    """The version below which versions may lose their files; 0 before the first collection.

    Raises:
        UnavailableError: the store is unavailable.
    """
    return published_version(objects, HORIZON_FOLDER)


def publish_collected_horizon(objects: Objects, version: TableVersion) -> None:
    """Announce that versions below this one may lose their files; call it before the first deletion.

    Raises:
        UnavailableError: the store is unavailable; the horizon may or may not be published.
    """
    publish_version(objects, HORIZON_FOLDER, version, _SAYS)
