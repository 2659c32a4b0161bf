"""The file system below a local object store: the few calls that it makes, and which of them survive a power cut.

`FileSystem` is a seam. `SystemFiles` is the operating system's; the simulator plugs in one that forgets at
a power cut what was not synced. Nothing but `sync` is promised to survive: the contents of a file survive after
its own sync, its name after that of its folder.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol

from millpond.statestore.objects.ranges import ByteRange

_PIECE_BYTES: Final = 8 << 20
_SYNCS_AT_ONCE: Final = 4
"""The kernel writes the journal once for syncs that come together; more threads than this gain nothing."""

_NO_FOLDER_SYNC: Final = frozenset({errno.EBADF, errno.EINVAL})
"""What a file system answers that has no sync of folders, because it needs none (some over a network)."""


class LostWriteError(OSError):
    """A sync failed: what was written may be lost, and a later sync would not say so."""


class FileSystem(Protocol):
    """What a local object store asks of a file system; paths are absolute. Errors are `OSError`'s."""

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        """Create a file with these contents.

        Raises:
            FileExistsError: the name is taken; nothing was written.
        """
        ...

    def read(self, path: str) -> bytes:
        """A file's contents."""
        ...

    def read_pieces(self, path: str) -> Iterator[bytes]:
        """A file's contents in pieces of 8 MiB."""
        ...

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of a file's contents, shorter where it ends before."""
        ...

    def size_bytes(self, path: str) -> int:
        """How long a file is."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name.

        Raises:
            FileExistsError: the name is taken.
        """
        ...

    def replace(self, source: str, target: str) -> None:
        """Rename a file; a file that has the name already loses it."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def make_folder(self, path: str) -> None:
        """Make one folder.

        Raises:
            FileExistsError: the name is taken.
        """
        ...

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at the path."""
        ...

    def walk(self, folder: str) -> Iterator[str]:
        """The paths of all files below a folder, in any order; none if there is no such folder."""
        ...

    def sync(self, paths: Collection[str]) -> None:
        """Let the contents of files and the names in folders survive a power cut; missing paths are skipped.

        Raises:
            LostWriteError: some were not written, and may be lost.
        """
        ...


class SystemFiles:
    """The operating system's file system; several paths are synced at once, by four threads at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_owner = 0

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        """Create a file with these contents; if they cannot be written, the file is removed again."""
        with open(path, "xb") as file:  # noqa: PTH123 - paths are text here, as the hot path has them
            try:
                file.writelines(pieces)
                file.flush()
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
                raise

    def read(self, path: str) -> bytes:
        """A file's contents."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.readall()

    def read_pieces(self, path: str) -> Iterator[bytes]:
        """A file's contents in pieces."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of a file's contents."""
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return [os.pread(file.fileno(), part.end - part.start, part.start) for part in ranges]

    def size_bytes(self, path: str) -> int:
        """How long a file is."""
        return os.stat(path).st_size  # noqa: PTH116

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Rename a file."""
        os.replace(source, target)  # noqa: PTH105

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)  # noqa: PTH108

    def make_folder(self, path: str) -> None:
        """Make one folder."""
        os.mkdir(path)  # noqa: PTH102

    def is_folder(self, path: str) -> bool:
        """Whether there is a folder at the path."""
        return os.path.isdir(path)  # noqa: PTH112

    def walk(self, folder: str) -> Iterator[str]:
        """The paths of all files below a folder, links followed."""
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            # It is not there, or a collector has removed it since its name was read.
            return
        for entry in listed:
            if entry.is_dir():
                yield from self.walk(entry.path)
            else:
                yield entry.path

    def sync(self, paths: Collection[str]) -> None:
        """Sync files and folders, several at once."""
        if len(paths) > 1:
            # All are waited for, so an error is raised only when none is under way any more.
            results = [
                future.exception() for future in [self._threads().submit(_sync, path) for path in paths]
            ]
            for error in results:
                if error is not None:
                    raise error
        else:
            for path in paths:
                _sync(path)

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            # A forked process has the pool without its threads.
            if self._pool is None or self._pool_owner != os.getpid():
                self._pool = ThreadPoolExecutor(_SYNCS_AT_ONCE, "millpond-sync")
                self._pool_owner = os.getpid()
            return self._pool


def _sync(path: str) -> None:
    """Sync one file or folder; folders by the rule of PostgreSQL's ``fsync_fname``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except PermissionError:
        if os.path.isdir(path):  # noqa: PTH112
            # A folder above the store, in which this process can have made nothing.
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _NO_FOLDER_SYNC and os.path.isdir(path):  # noqa: PTH112
            return
        raise LostWriteError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)
