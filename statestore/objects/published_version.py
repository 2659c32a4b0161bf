"""Published versions: a number that only rises, which several processes announce through the object store.

A published version is an object whose name is the number. Lower ones are deleted only after a higher one exists, so of
two processes that publish at the same time the higher number stays. The one before the newest stays as well: a listing of
a local folder reads the names first and each file's metadata afterwards, so a listing during a replacement might see
neither. The folders' names begin with an underscore, so Delta readers and their vacuum ignore them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millpond.statestore.errors import ObjectExistsError
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from millpond.statestore.types import Objects


def published_version(objects: Objects, folder: str) -> TableVersion:
    """The highest version that is published in a folder; 0 if there is none.

    Raises:
        UnavailableError: the store is unavailable.
    """
    names = (path.rpartition("/")[2] for path in objects.list(folder))
    return TableVersion(max((int(name) for name in names if name.isdecimal()), default=0))


def publish_version(objects: Objects, folder: str, version: TableVersion, text: bytes) -> None:
    """Publish a version in a folder; one that is not above the published one changes nothing.

    Args:
        objects: the table's root.
        folder: where versions of this meaning are published.
        version: the version.
        text: what it says to people who find it.

    Raises:
        UnavailableError: the store is unavailable; the version may or may not be published.
    """
    last = published_version(objects, folder)
    if version <= last:
        return
    try:
        objects.put_if_absent(f"{folder}/{version:020d}", text)
    except ObjectExistsError:
        # Another process has published the same version.
        return
    oldest = f"{folder}/{last:020d}"
    objects.delete([other for other in objects.list(folder) if other < oldest])
