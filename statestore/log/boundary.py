"""
The boundary of the log: below it, commit files may be gone, and nothing that is put there counts.

A version is won by putting its commit file where there is none. Where a cleanup has deleted
commits, there is none either: a writer that stood still before the cleanup would win a version
that everybody has passed, in a part of the log that nobody reads. So a cleanup publishes
its boundary before it deletes, and every writer looks at it after its put: what lies below
is no commit. No clock is asked.

A boundary is an object whose name is its version; objects are only added until a higher one is
there, so of two cleanups at once the higher boundary stays. The one before the newest stays as well: a
local folder is listed by its names first and a look at each then, and who lists it while a boundary
takes the place of another would find neither. The folder's name begins with an underscore: Delta
readers and their vacuum leave such folders alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millpond.statestore.errors import ObjectExistsError
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.types import Objects

__all__ = ["BOUNDARY_FOLDER", "log_boundary", "publish_log_boundary"]

BOUNDARY_FOLDER: Final = "_millpond/log_boundary"

_SAYS: Final = b"Commits below this version may be deleted; nothing that is put below it counts.\n"


def log_boundary(objects: Objects) -> TableVersion:
    """
    The version below which commit files may be gone; 0 where none ever were.

    Raises:
        UnavailableError: the store is away.
    """
    names = (path.rpartition("/")[2] for path in objects.list(BOUNDARY_FOLDER))
    return TableVersion(max((int(name) for name in names if name.isdecimal()), default=0))


def publish_log_boundary(objects: Objects, version: TableVersion) -> None:
    """
    Say that commits below ``version`` may go, before the first one does; a lower boundary changes nothing.

    Raises:
        UnavailableError: the store is away; it may or may not have been published.
    """
    last = log_boundary(objects)
    if version <= last:
        return
    path = f"{BOUNDARY_FOLDER}/{version:020d}"
    try:
        objects.put_if_absent(path, _SAYS)
    except ObjectExistsError:
        # Another cleanup says the same.
        return
    oldest = f"{BOUNDARY_FOLDER}/{last:020d}"
    objects.delete([other for other in objects.list(BOUNDARY_FOLDER) if other < oldest])
