"""The location of a store: a folder of this machine, or a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from millpond.statestore.errors import InvalidError

_ONE_SLASH: Final = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)
"""A scheme of at least two letters, as drives have one."""

ROWS_FOLDER: Final = "rows"
"""The folder of the table within that of the store."""


def place_of(path: str | Path) -> str:
    """A store's location, the same for every process: an absolute path, or a URL without a trailing slash.

    Example:
        >>> place_of("s3://bucket/pond/")
        's3://bucket/pond'
    """
    local = local_folder(path)
    return str(path).rstrip("/") if local is None else str(local)


def local_folder(path: str | Path) -> Path | None:
    """The folder of a store on this machine; ``None`` for one in an object store."""
    text = str(path)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://")).resolve()
    return None if "://" in text else Path(path).resolve()


def check_location(local: Path | None, path: str | Path, *, create: bool) -> None:
    """Refuse a location that has no store, unless one can be created there.

    Args:
        local: the folder; ``None`` for an object store, which is not checked here.
        path: the path as the user wrote it.
        create: whether a store may be created there.

    Raises:
        InvalidError: there is no store and none can be created, or none may be.
    """
    if local is None:
        return
    if _ONE_SLASH.match(str(path)):
        raise InvalidError(
            "this is a URL with one slash, or a path that only Spark knows: write s3://…, or the folder's path on this "
            "machine, such as /dbfs/… for dbfs:/…",
            path=path,
        )
    if local.exists() and not local.is_dir():
        raise InvalidError(
            "a store is a folder, and there is a file at its path: name another place", path=path
        )
    blocking = next((parent for parent in local.parents if parent.is_file()), None)
    if blocking is not None:
        raise InvalidError(
            "a store is a folder, and there is a file on the way to it", path=path, file=blocking
        )
    log = local / ROWS_FOLDER / "_delta_log"
    if log.is_dir():
        return
    # A process that was killed while creating the store leaves an empty `rows`.
    is_used = local.is_dir() and any(
        entry.name != ROWS_FOLDER or not entry.is_dir() or any(entry.iterdir()) for entry in local.iterdir()
    )
    # Another process may have created the store since the first look.
    if is_used and not log.is_dir():
        raise InvalidError(
            "the folder is not empty and is not a Millpond store: name the folder of one, or an empty or a new folder",
            path=path,
        )
    if not create and not log.is_dir():
        raise InvalidError(
            "there is no store at this path: a store is the folder that a runner was given", path=path
        )
