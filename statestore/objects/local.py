"""An object store in a local folder, whose objects survive a power cut.

An object is written under a temporary name, ``NAME#1``, and then linked to its name. The link fails if the name is
taken, so the object is created whole or not at all. Listings skip temporary names, here and in the ``object_store``
of other Delta readers.

With ``durability="disk"`` writes reach the disk in the order of the commit protocol. The contents of an object, and every
file and folder put before, are synced before the object gets its name. The name is synced before
`LocalObjects.put_if_absent` returns. So a name never reaches the disk without its contents, a commit never without the
row files that it names, and a power cut never reverts an acknowledged write.

Calls run in the caller's thread; only syncs use threads, at most four.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

from millpond.statestore.errors import InvalidError, ObjectExistsError, ObjectMissingError, UnavailableError
from millpond.statestore.objects.ranges import ByteRange, Tail
from millpond.statestore.types import DURABILITIES, Durability

_PIECE_BYTES: Final = 8 << 20
# The kernel writes its journal once for concurrent syncs, so more threads gain nothing.
_SYNCS_AT_ONCE: Final = 4
# Errors of file systems (some over a network) that cannot sync folders, and need not.
_NO_FOLDER_SYNC: Final = frozenset({errno.EBADF, errno.EINVAL})


class LostWriteError(OSError):
    """A sync failed: the writes may be lost, and a later sync would not report it."""


class FileSystem(Protocol):
    """The calls that a local object store makes to a file system; paths are absolute, errors are `OSError`.

    This is a seam: the simulator plugs in a file system that loses unsynced writes at a power cut. A file's contents
    survive after a sync of the file, and its name survives after a sync of its folder.

    `create`, `link` and `make_folder` raise `FileExistsError` if the name is taken. `read_ranges` gives shorter parts
    where the file ends, and `walk` all files below a folder, in any order, or nothing if it is missing. `sync` skips
    missing paths and raises `LostWriteError` if writes may be lost.
    """

    def create(self, path: str, pieces: Iterable[bytes]) -> None: ...
    def read(self, path: str) -> bytes: ...
    def read_pieces(self, path: str) -> Iterator[bytes]: ...
    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]: ...
    def size_bytes(self, path: str) -> int: ...
    def link(self, source: str, target: str) -> None: ...
    def replace(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def make_folder(self, path: str) -> None: ...
    def is_folder(self, path: str) -> bool: ...
    def walk(self, folder: str) -> Iterator[str]: ...
    def sync(self, paths: Collection[str]) -> None: ...


class SystemFiles:
    """The operating system's file system."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_owner = 0

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        with open(path, "xb") as file:  # noqa: PTH123 - paths are text here, as the hot path has them
            try:
                file.writelines(pieces)
                file.flush()
            except BaseException:
                with suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
                raise

    def read(self, path: str) -> bytes:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.readall()

    def read_pieces(self, path: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return [os.pread(file.fileno(), part.end - part.start, part.start) for part in ranges]

    def size_bytes(self, path: str) -> int:
        return os.stat(path).st_size  # noqa: PTH116

    def link(self, source: str, target: str) -> None:
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        os.replace(source, target)  # noqa: PTH105

    def remove(self, path: str) -> None:
        os.unlink(path)  # noqa: PTH108

    def make_folder(self, path: str) -> None:
        os.mkdir(path)  # noqa: PTH102

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path)  # noqa: PTH112

    def walk(self, folder: str) -> Iterator[str]:
        try:
            with os.scandir(folder) as entries:
                listed = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            # The folder is missing, or a collector removed it after its name was read.
            return
        for entry in listed:
            if entry.is_dir():
                yield from self.walk(entry.path)
            else:
                yield entry.path

    def sync(self, paths: Collection[str]) -> None:
        if len(paths) == 1:
            _sync(*paths)
            return
        # Wait for all before raising, so that no sync is still running when the caller handles the error.
        started = [self._threads().submit(_sync, path) for path in paths]
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


def _sync(path: str) -> None:
    """Sync one file or folder; folders by the rule of PostgreSQL's ``fsync_fname``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
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


# Each temporary file of an object belongs to a dead process or to a concurrent writer.
_STAGED_MAX: Final = 1_000
_MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class LocalObjects:
    """`Objects` in a local folder, which is created if missing; it pickles as its path and durability.

    ``durability="disk"`` syncs. ``"os_cache"`` leaves that to the operating system, which writes within about half a
    minute, so objects survive the end of this process but not a power cut.
    """

    def __init__(
        self, path: str | Path, durability: Durability = "disk", *, files: FileSystem | None = None
    ) -> None:
        if durability not in DURABILITIES:
            raise InvalidError("there is no such durability", durability=durability, known=DURABILITIES)
        self.url: Final[str] = str(Path(path).absolute())
        self.durability: Final[Durability] = durability
        self._files: FileSystem = files or SystemFiles()
        self._syncs = durability == "disk"
        self._lock = threading.Lock()
        self._one_sync = threading.Lock()
        self._unsynced: set[str] = set()
        self._known_folders: set[str] = set()
        self._has_lost = False
        with self._errors(""):
            self._use_folder(self.url)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (LocalObjects, (self.url, self.durability))

    def __repr__(self) -> str:
        return f"LocalObjects({self.url!r}, {self.durability!r})"

    @property
    def storage_options(self) -> Mapping[str, str]:
        return {}

    def put_if_absent(self, path: str, data: bytes) -> None:
        self._publish(path, (data,), self._link)

    def put_unsynced(self, path: str, data: bytes) -> None:
        self._publish(path, (data,), self._link, synced=False)

    def put(self, path: str, data: bytes) -> None:
        self._publish(path, (data,), self._files.replace)

    def sync(self, paths: Iterable[str] = ()) -> None:
        with self._errors(""):
            targets = [self._target(path) for path in paths]
            self._sync((*targets, *{_folder_of(target) for target in targets}))

    def get(self, path: str) -> bytes:
        with self._errors(path, _MISSING):
            return self._files.read(self._target(path))

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        with self._errors(path, _MISSING):
            return self._files.read_ranges(self._target(path), ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        with self._errors(path, _MISSING):
            target = self._target(path)
            end = self._files.size_bytes(target)
            (data,) = self._files.read_ranges(target, [ByteRange(max(0, end - size_bytes), end)])
            return Tail(data, end)

    def download(self, path: str, target: Path) -> None:
        """Copy the object into another local file, piece by piece."""
        with self._errors(path, _MISSING):
            pieces = self._files.read_pieces(self._target(path))
            first = next(pieces, b"")
        with self._errors(path), target.open("wb") as file:
            file.write(first)
            file.writelines(pieces)

    def upload(self, path: str, source: Path) -> None:
        """Create the object from another local file, piece by piece."""
        self._publish(path, SystemFiles().read_pieces(str(source)), self._link)

    def link_from(self, other: LocalObjects, path: str) -> None:
        """Give an object of another folder a second name here, which survives a power cut after the next `sync`.

        It raises `OSError` if the object is missing, the folders are on different disks, or the disk has no hard links.
        """
        target = self._target(path)
        self._use_folder(_folder_of(target))
        self._link(other._target(path), target)
        self._record_unsynced((target, _folder_of(target)))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        with self._errors(prefix):
            folder = self._target(prefix.rstrip("/")) if prefix else self.url
            start = len(self.url) + 1
            paths = [path[start:] for path in self._files.walk(folder) if not _is_staged(path)]
        return sorted(path for path in paths if start_after is None or path > start_after)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; a power cut may bring them back until the next sync."""
        for path in paths:
            with self._errors(path):
                target = self._target(path)
                with suppress(*_MISSING):
                    self._files.remove(target)
                    self._record_unsynced((_folder_of(target),))

    # -- how an object gets its name -------------------------------------------------------

    def _publish(
        self, path: str, pieces: Iterable[bytes], name: Callable[[str, str], None], *, synced: bool = True
    ) -> None:
        """Write the contents under a temporary name, and let ``name`` give them the object's."""
        with self._errors(path):
            target = self._target(path)
            folder = _folder_of(target)
            self._use_folder(folder)
            try:
                staged = self._stage(path, pieces)
            except FileNotFoundError:
                # The folder may have been removed since its first use.
                self._known_folders.discard(folder)
                self._use_folder(folder)
                staged = self._stage(path, pieces)
            try:
                if synced:
                    # Contents before the name: otherwise a power cut could leave a name without its contents.
                    self._sync((staged,))
                name(staged, target)
            finally:
                with suppress(FileNotFoundError):
                    self._files.remove(staged)
            if synced:
                self._sync((folder,))
            else:
                self._record_unsynced((target, folder))

    def _stage(self, path: str, pieces: Iterable[bytes]) -> str:
        target = self._target(path)
        for number in range(1, _STAGED_MAX):
            staged = f"{target}#{number}"
            with suppress(FileExistsError):
                self._files.create(staged, pieces)
                return staged
        raise UnavailableError("too many unfinished files of one object", path=path, store=self.url)

    def _link(self, staged: str, target: str) -> None:
        try:
            self._files.link(staged, target)
        except FileExistsError as error:
            # Sync before reporting that it exists: it may be the caller's own, from an attempt that failed between
            # the link and the sync of the name, and the caller would count it as durable.
            self._sync((target, _folder_of(target)))
            raise ObjectExistsError(
                "the object exists", path=target[len(self.url) + 1 :], store=self.url
            ) from error

    # -- what survives ---------------------------------------------------------------------

    def _use_folder(self, folder: str) -> None:
        """Make a folder if it is missing, and have its name synced."""
        if folder in self._known_folders:
            return
        # Sync existing folders too: the process that made them may not have synced them yet.
        made = self._make_folders(folder)
        above_root = _folder_of(self.url)
        changed = {*made, *map(_folder_of, made), *_between(folder, self.url)}
        self._record_unsynced({*changed, above_root, _folder_of(above_root)})
        with self._lock:
            self._known_folders.add(folder)

    def _make_folders(self, folder: str) -> Sequence[str]:
        missing: list[str] = []
        while not self._files.is_folder(folder):
            missing.append(folder)
            above = _folder_of(folder)
            if above == folder:
                break
            folder = above
        for path in reversed(missing):
            try:
                self._files.make_folder(path)
            except FileExistsError:
                if not self._files.is_folder(path):
                    raise NotADirectoryError(
                        errno.ENOTDIR, "a file is in the place of a folder", path
                    ) from None
        return missing

    def _record_unsynced(self, paths: Collection[str]) -> None:
        if self._syncs:
            with self._lock:
                self._unsynced.update(paths)

    def _sync(self, paths: Collection[str]) -> None:
        """Sync these paths together with all recorded ones."""
        if not self._syncs:
            return
        # One at a time: otherwise a second caller would rely on files that the first is still syncing.
        with self._one_sync:
            if self._has_lost:
                raise OSError(errno.EIO, "an earlier sync failed, and its writes may be lost: start again")
            with self._lock:
                noted, self._unsynced = self._unsynced, set()
            try:
                self._files.sync(sorted({*noted, *paths}))
            except LostWriteError:
                # Fail every later sync: the kernel reports a lost page once and then counts it as written.
                self._has_lost = True
                raise
            except BaseException:
                self._record_unsynced(noted)
                raise

    # -- paths and errors ------------------------------------------------------------------

    def _target(self, path: str) -> str:
        if any(part in {"", ".", ".."} for part in path.split("/")):
            raise ValueError(f"not a path of an object: {path!r}")
        return f"{self.url}/{path}"

    @contextmanager
    def _errors(self, path: str, missing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        try:
            yield
        except (ObjectExistsError, UnavailableError):
            raise
        except missing as error:
            raise ObjectMissingError("the object is missing", path=path, store=self.url) from error
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"the object store failed{_way_out(error)}", path=path, store=self.url, cause=error
            ) from error


def _way_out(error: OSError | ValueError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ": this user may not write there; grant the permission, or use another folder"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return ": the disk is full; make room, and waiting work resumes"
    return ""


def _folder_of(path: str) -> str:
    return os.path.dirname(path)  # noqa: PTH120 - paths are text here, as the hot path has them


def _between(folder: str, root: str) -> Iterator[str]:
    """Yield a folder and the folders above it, up to the root."""
    while len(folder) >= len(root):
        yield folder
        folder = _folder_of(folder)


def _is_staged(path: str) -> bool:
    _, mark, number = path.rpartition("#")
    return bool(mark) and number.isdecimal()
