"""Forks of whole stores: the table, and the checkpoints of Spark's queries in the store's folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from millpond.executor.replay.spark_checkpoint import (
    by_query,
    checkpoints_in,
    forget_later_files,
    rewind_checkpoints,
)
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.history.fork import Forked, fork_table
from millpond.statestore.history.lineage import ROWS_FOLDER, check_location, local_folder, place_of
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng

_CHECKPOINTS = "checkpoints"
_NONE: Final[Mapping[str, bytes]] = {}


def fork_store(
    store: Store,
    path: str | Path,
    version: int | None = None,
    *,
    notes: Mapping[str, bytes] = _NONE,
    clock: Clock | None = None,
    rng: Rng | None = None,
    told: Callable[[int, int], None] = lambda *_: None,
) -> Forked:
    """Create an independent store that begins with a version of another one, which may run meanwhile.

    On one disk, row files get a second name instead of a copy, and neither store depends on the other.
    On an object store, or on another disk, the files are copied. A pipeline that runs on the fork writes to sinks
    in the fork's folder, whatever its code names; `millpond take-over` makes an exception.

    Args:
        store: the open store; read-only is enough.
        path: location of the fork: a missing or empty folder, or a URL.
        version: the version that it begins with; ``None`` for the newest.
        notes: further files of the fork's folder, by path, which exist as soon as the store does.
        clock: the source of time.
        rng: the source of names.
        told: called after each file, with the number of files done and the total.

    Raises:
        InvalidError: the path is not empty, or there is no such version.
        ConflictError: the version has been collected.
        DataError: the log is damaged, or does not reach back that far.
        UnavailableError: a store, or this machine's disk, failed.

    Example::

        with mp.Store.open("pond", read_only=True) as store:
            mp.fork_store(store, "what_if", version=12)
    """
    place, local = place_of(path), local_folder(path)
    check_location(local, path, create=True)
    if local is not None and (local / ROWS_FOLDER / "_delta_log").is_dir():
        raise InvalidError(
            "there is a store at this path already: name a folder that is not there yet", path=place
        )
    clock, rng = clock or SystemClock(), rng or SystemRng()
    with store.reading(version) as snapshot:

        def fork_rows(folder: str) -> Forked:
            target = open_objects(folder, store.storage_options, folder=ROWS_FOLDER)
            return fork_table(store.objects, target, place, snapshot.version, clock, rng, on_progress=told)

        if local is None:
            _put(notes, place, store)
            return fork_rows(place)
        # Under another name first: a process that is killed leaves no half of a store.
        staged = local.with_name(f".{local.name}.forking")
        try:
            shutil.rmtree(staged, ignore_errors=True)
            forked = fork_rows(str(staged))
            _take_checkpoints(store, staged, snapshot)
            _put(notes, str(staged), store)
            if local.is_dir():
                local.rmdir()
            staged.rename(local)
        except OSError as error:
            raise UnavailableError("this machine's disk failed", path=place, cause=error) from error
        return forked


def _put(notes: Mapping[str, bytes], folder: str, store: Store) -> None:
    objects = open_objects(folder, store.storage_options)
    for path, text in notes.items():
        objects.put(path, text)


def _take_checkpoints(store: Store, folder: Path, snapshot: Snapshot) -> None:
    """Copy the checkpoints of Spark's queries, and rewind the copies to the version."""
    theirs = local_folder(store.path)
    if theirs is None or not (theirs / _CHECKPOINTS).is_dir():
        return
    source, copy = LocalObjects(theirs / _CHECKPOINTS), LocalObjects(folder / _CHECKPOINTS, "os_cache")
    for path in source.list(""):
        copy.copy_from(source, path)
    found = checkpoints_in(folder / _CHECKPOINTS)
    # Of a query that had not begun by then the version knows nothing.
    consumed = dict.fromkeys(found, -1) | by_query(snapshot.txns)
    rewind_checkpoints(folder / _CHECKPOINTS, consumed, offsets=by_query(snapshot.source_offsets))
    for query, checkpoint in found.items():
        forget_later_files(checkpoint, consumed[query])
