"""Sharing of objects between stores: on one disk both have the same bytes, elsewhere the second gets a copy.

An object is never changed in place, so two names for the same bytes on a disk (hard links) are as good as two copies:
each store deletes its own name, and the bytes go with the last one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from millpond.statestore.errors import ObjectMissingError
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import download, upload
from millpond.statestore.types import Objects


def share_object(source: Objects, target: Objects, path: str) -> bool:
    """Give an object of one store to another one, under the same path.

    Args:
        source: the store that has it.
        target: the store that gets it.
        path: the object's.

    Returns:
        Whether both have the same bytes on a disk now; if not, it was copied.

    Raises:
        ObjectMissingError: there is no such object.
        ObjectExistsError: the target has another object of that path.
        UnavailableError: a store, or this machine's disk, failed.
    """
    if isinstance(source, LocalObjects) and isinstance(target, LocalObjects):
        try:
            target.link_from(source, path)
        except FileNotFoundError as error:
            raise ObjectMissingError("object is missing", path=path, store=source.url) from error
        except OSError:
            # Another disk, or one without hard links.
            pass
        else:
            return True
    with tempfile.TemporaryDirectory(prefix="millpond-share-") as folder:
        copy = Path(folder, "object")
        download(source, path, copy)
        upload(target, path, copy)
    return False
