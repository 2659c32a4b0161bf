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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from millpond.statestore.errors import (
    DataError,
    InvalidError,
    ObjectExistsError,
    ObjectMissingError,
    UnavailableError,
)
from millpond.statestore.objects.ranges import ByteRange, Tail
from millpond.statestore.objects.system_files import (
    ForeignFileError,
    LostWriteError,
    SystemFiles,
    is_object_path,
    way_out,
)
from millpond.statestore.types import DURABILITIES, Durability


class FileSystem(Protocol):
    """The calls that a local object store makes to a file system; paths are absolute, errors are `OSError`.

    This is a seam: the simulator plugs in a file system that loses unsynced writes at a power cut. A file's contents
    survive after a sync of the file, and its name survives after a sync of its folder.

    `create`, `link` and `make_folder` raise `FileExistsError` if the name is taken. `read_ranges` gives shorter parts
    where the file ends, and `walk` all files below a folder, in any order, or nothing if it is missing. `sync` skips
    missing paths and raises `LostWriteError` if writes may be lost. A link, a FIFO or a device in the place of a file or
    folder raises `ForeignFileError`.
    """

    def create(self, path: str, pieces: Iterable[bytes]) -> None: ...
    def read(self, path: str) -> bytes: ...
    def read_pieces(self, path: str) -> Iterator[bytes]: ...
    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]: ...
    def read_tail(self, path: str, size_bytes: int) -> Tail: ...
    def link(self, source: str, target: str) -> None: ...
    def replace(self, source: str, target: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def make_folder(self, path: str) -> None: ...
    def is_folder(self, path: str) -> bool: ...
    def walk(self, folder: str) -> Iterator[str]: ...
    def sync(self, paths: Collection[str]) -> None: ...


_PIECE_BYTES: Final = 8 << 20
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
        self._files: FileSystem = files or SystemFiles(self.url)
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
            return self._files.read_tail(self._target(path), size_bytes)

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
        with source.open("rb") as file:
            self._publish(path, iter(partial(file.read, _PIECE_BYTES), b""), self._link)

    def copy_from(self, other: LocalObjects, path: str) -> None:
        """Create the object from the one of another folder, piece by piece."""
        self._publish(path, other._files.read_pieces(other._target(path)), self._link)

    def link_from(self, other: LocalObjects, path: str) -> None:
        """Give an object of another folder a second name here, which survives a power cut after the next `sync`.

        It raises `OSError` if the object is missing, the folders are on different disks, or the disk has no hard links.
        """
        target, source = self._target(path), other._target(path)
        # A link below the other folder could name any file of this user.
        other._files.read_ranges(source, ())
        self._use_folder(_folder_of(target))
        self._link(source, target)
        self._record_unsynced((target, _folder_of(target)))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        with self._errors(prefix):
            folder = self._target(prefix.rstrip("/")) if prefix else self.url
            start = len(self.url) + 1
            paths = [path[start:] for path in self._files.walk(folder) if not _is_staged(path)]
        return sorted(path for path in paths if start_after is None or path > start_after)

    def refuse_links(self) -> None:
        """Raise `DataError` for anything but files and folders, before another program reads or writes here."""
        with self._errors(""):
            SystemFiles(self.url).refuse_links()

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
        if not is_object_path(path):
            raise DataError("no object of a store can have this path", path=path, store=self.url)
        return f"{self.url}/{path}"

    @contextmanager
    def _errors(self, path: str, missing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        try:
            yield
        except missing as error:
            raise ObjectMissingError("the object is missing", path=path, store=self.url) from error
        except ForeignFileError as error:
            raise DataError(
                "a store's files and folders must not be links, FIFOs, devices or sockets: remove it, or restore the "
                "file from a copy",
                path=path,
                found=error.filename,
            ) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise DataError("the path is too long for this disk", path=path, store=self.url) from error
            raise UnavailableError(
                f"the object store failed{way_out(error)}", path=path, store=self.url, cause=error
            ) from error


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
