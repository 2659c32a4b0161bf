"""The operating system's files below one folder, reached without following a link.

Whoever made the folder may have put links, FIFOs or devices there. So each folder on the way is opened from the one
above it with ``O_NOFOLLOW``, files are made with ``O_EXCL``, and only regular files are read, without waiting. Nothing
below the folder leads out of it. The folder itself must not be a link; the folders above it are trusted.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from millpond.statestore.objects.ranges import ByteRange, Tail

_PIECE_BYTES: Final = 8 << 20
# The kernel writes its journal once for concurrent syncs, so more threads gain nothing.
_SYNCS_AT_ONCE: Final = 4
# Errors of file systems (some over a network) that cannot sync folders, and need not.
_NO_FOLDER_SYNC: Final = frozenset({errno.EBADF, errno.EINVAL})
# Open folders of a root, which spare the way to them.
_FOLDERS_MAX: Final = 16
# Deeper than any folder of a store; each level costs an open descriptor.
_DEPTH_MAX: Final = 32

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO waits for its writer.
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_PART: Final = r"(?!\.\.?(?:/|$))[^/\x00-\x1f\x7f-\x9f\ud800-\udfff]+"
_PATH: Final = re.compile(rf"(?![A-Za-z][A-Za-z0-9+.-]*:){_PART}(?:/{_PART})*")


def is_object_path(path: str) -> bool:
    r"""Return True for a relative path of plain names, which cannot lead out of a store.

    Example:
        >>> [is_object_path(path) for path in ("computation=c/a b", "../a", "/a", "s3://b/a", "a//b", "a\\0")]
        [True, False, False, False, False, False]
    """
    return _PATH.fullmatch(path) is not None


class LostWriteError(OSError):
    """A sync failed: the writes may be lost, and a later sync would not report it."""


class ForeignFileError(OSError):
    """A link, FIFO, device or socket is in the place of a file or folder."""

    def __init__(self, path: str) -> None:
        super().__init__(
            errno.ELOOP, "a link, FIFO, device or socket is in the place of a file or folder", path
        )


def way_out(error: OSError) -> str:
    """Return the end of a sentence about an error of the disk: what helps, where something does."""
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ": this user may not write there; grant the permission, or use another folder"
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ": the disk is full; make room, and waiting work resumes"
    return ""


def is_file(path: str) -> bool:
    """Return True for a file and False where nothing is; anything else raises `ForeignFileError`.

    It is for programs that open a path by themselves; the folder of the path is trusted.
    """
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(mode):
        raise ForeignFileError(path)
    return True


class SystemFiles:
    """The files below ``root``; paths are absolute. Only `is_folder`, `make_folder` and `sync` take paths above it.

    ``mode`` is that of new files.
    """

    def __init__(self, root: str, mode: int = 0o666) -> None:
        self._root = root
        self._mode = mode
        self._start = len(root.rstrip("/")) + 1
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_owner = 0

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        with open(self._open(path, _CREATE), "wb") as file:  # noqa: PTH123 - a descriptor
            try:
                file.writelines(pieces)
                file.flush()
            except BaseException:
                with suppress(OSError):
                    self.remove(path)
                raise

    def overwrite(self, path: str, data: bytes) -> None:
        """Replace a file by a new one, which is first written as ``PATH.new``."""
        with suppress(FileNotFoundError):
            self.remove(f"{path}.new")
        self.create(f"{path}.new", (data,))
        self.replace(f"{path}.new", path)

    def open(self, path: str, flags: int) -> int:
        """Return the descriptor of a regular file."""
        return self._open_file(path, flags | _READ)[0]

    def read(self, path: str) -> bytes:
        descriptor, size_bytes = self._open_file(path)
        try:
            data = os.read(descriptor, size_bytes + 1)
            if len(data) == size_bytes:
                return data
            # The file has grown, or one call cannot read it whole.
            return b"".join((data, *iter(partial(os.read, descriptor, _PIECE_BYTES), b"")))
        finally:
            os.close(descriptor)

    def read_pieces(self, path: str) -> Iterator[bytes]:
        with io.FileIO(self._open_file(path)[0]) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        descriptor, _ = self._open_file(path)
        try:
            return [os.pread(descriptor, part.end - part.start, part.start) for part in ranges]
        finally:
            os.close(descriptor)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        descriptor, end = self._open_file(path)
        try:
            start = max(0, end - size_bytes)
            return Tail(os.pread(descriptor, end - start, start), end)
        finally:
            os.close(descriptor)

    def link(self, source: str, target: str) -> None:
        """Link a file of the same folder, or of another root, where the caller has checked that it is a file."""
        above, _, name = source.rpartition("/")
        folder, target_name = self._above(target)
        is_near = target == f"{above}/{target_name}"
        os.link(
            name if is_near else source,
            target_name,
            src_dir_fd=folder.descriptor if is_near else None,
            dst_dir_fd=folder.descriptor,
            follow_symlinks=False,
        )

    def replace(self, source: str, target: str) -> None:
        """Rename a file of the same folder."""
        folder, name = self._above(target)
        os.replace(
            source.rpartition("/")[2], name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor
        )

    def remove(self, path: str) -> None:
        folder, name = self._above(path)
        os.unlink(name, dir_fd=folder.descriptor)

    def make_folder(self, path: str) -> None:
        if len(path) < self._start:
            os.mkdir(path)  # noqa: PTH102
            return
        folder, name = self._above(path)
        # Whoever may read the folder may also enter it.
        os.mkdir(name, self._mode | self._mode >> 2 & 0o111, dir_fd=folder.descriptor)

    def is_folder(self, path: str) -> bool:
        if len(path) + 1 < self._start:
            return os.path.isdir(path)  # noqa: PTH112
        try:
            self._folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def walk(self, folder: str) -> Iterator[str]:
        """Yield the paths of everything below a folder that is not a folder, links included."""
        try:
            descriptor = self._open_folder(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from (path for path, _ in _walk(descriptor, folder, _DEPTH_MAX))

    def refuse_links(self) -> None:
        """Raise `ForeignFileError` unless everything below the root is a file or a folder."""
        for path, entry in _walk(self._open_folder(self._root), self._root, _DEPTH_MAX):
            if not entry.is_file(follow_symlinks=False):
                # It may also have been removed since its name was read.
                is_file(path)

    def sync(self, paths: Collection[str]) -> None:
        if len(paths) == 1:
            self._sync(*paths)
            return
        # Wait for all before raising, so that no sync is still running when the caller handles the error.
        started = [self._threads().submit(self._sync, path) for path in paths]
        for error in [future.exception() for future in started]:
            if error is not None:
                raise error

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            # A forked process inherits the pool without its threads.
            if self._pool is None or self._pool_owner != os.getpid():
                self._pool = ThreadPoolExecutor(_SYNCS_AT_ONCE, "millpond-sync")
                self._pool_owner = os.getpid()
            return self._pool

    def _sync(self, path: str) -> None:
        """Sync one file or folder; folders by the rule of PostgreSQL's ``fsync_fname``."""
        is_below = path.startswith(self._root) and len(path) > self._start
        try:
            descriptor = self._open(path, _READ) if is_below else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except PermissionError:
            if os.path.isdir(path):  # noqa: PTH112
                # A folder above the store: without permission, this process cannot have changed it.
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

    # -- from folder to folder -------------------------------------------------------------

    def _open_file(self, path: str, flags: int = _READ) -> tuple[int, int]:
        """Open a regular file, and return its size too."""
        descriptor = self._open(path, flags)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            return descriptor, status.st_size
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "a folder", path)
        raise ForeignFileError(path)

    def _open(self, path: str, flags: int) -> int:
        folder, name = self._above(path)
        try:
            return os.open(name, flags, self._mode, dir_fd=folder.descriptor)
        except OSError as error:
            # A link, or a socket.
            if error.errno in {errno.ELOOP, errno.ENXIO}:
                raise ForeignFileError(path) from error
            raise

    def _above(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        return self._folder(above), name

    def _folder(self, path: str) -> _Folder:
        """Open the root or a folder below it, or return the one opened earlier if it is still at the path."""
        known = self._folders.get(path)
        if known is not None:
            # An open folder keeps its inode from being reused, so whatever has taken its place has another one.
            status = os.lstat(path)
            if (status.st_dev, status.st_ino) == known.identity:
                return known
        opened = _Folder(self._open_folder(path))
        if len(self._folders) >= _FOLDERS_MAX:
            self._folders.clear()
        self._folders[path] = opened
        return opened

    def _open_folder(self, path: str) -> int:
        descriptor, name = None, self._root
        try:
            descriptor = os.open(name, _FOLDER)
            for name in path[self._start :].split("/") if len(path) > self._start else ():
                above, descriptor = descriptor, os.open(name, _FOLDER, dir_fd=descriptor)
                os.close(above)
        except OSError as error:
            # Linux answers ENOTDIR for a link, as for a file.
            is_link = error.errno in {errno.ELOOP, errno.ENOTDIR} and _is_link(name, descriptor)
            if descriptor is not None:
                os.close(descriptor)
            if is_link:
                raise ForeignFileError(path) from error
            raise
        return descriptor


class _Folder:
    """An open folder, closed with its last use."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        status = os.fstat(descriptor)
        self.identity = (status.st_dev, status.st_ino)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.descriptor)


def _is_link(name: str, above: int | None) -> bool:
    return stat.S_ISLNK(os.lstat(name, dir_fd=above).st_mode)


def _walk(descriptor: int, folder: str, depth: int) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is below an open folder, except folders, and close the folder."""
    try:
        with os.scandir(descriptor) as entries:
            listed = list(entries)
        for entry in listed:
            path = f"{folder}/{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                yield path, entry
            elif depth:
                # A collector may have removed the folder after its name was read.
                with suppress(FileNotFoundError, NotADirectoryError):
                    yield from _walk(os.open(entry.name, _FOLDER, dir_fd=descriptor), path, depth - 1)
    finally:
        os.close(descriptor)
