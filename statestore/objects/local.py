"""An object store in a local folder, whose objects survive a power cut.

An object is written under a name of its own, ``NAME#1`` (which listings skip, here and in ``object_store``, which
other Delta readers use), and then linked to its name, which fails if the name is taken: so it is created whole or not
at all. With ``durability="disk"`` the order on the disk is that of the commit protocol: before an object gets its
name, its contents are synced and so is everything that was put before, files and folders together; before
`LocalObjects.put_if_absent` returns, the name is synced as well. So no name is on the disk without its contents, no
commit without the row files that it names, and nothing is acknowledged that a power cut takes back.

Calls run in the caller's thread; only syncs use threads, four at most.

The file system below a local object store: the few calls that it makes, and which of them survive a power cut.

`FileSystem` is a seam. `SystemFiles` is the operating system's; the simulator plugs in one that forgets at
a power cut what was not synced. Nothing but `sync` is promised to survive: the contents of a file survive after
its own sync, its name after that of its folder.
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


_STAGED_MAX: Final = 1_000
"""How many unfinished files of one object are tolerated: each is of a process that died, or writes it now."""

_MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class LocalObjects:
    """`Objects` in a local folder, which is made if it is not there.

    It pickles as its path and durability, so another process opens its own.

    Args:
        path: the folder.
        durability: ``"disk"`` syncs, so that what was put survives a power cut; ``"os_cache"`` leaves that to the
            operating system, which writes what it has within half a minute or so: it survives the
            end of this process, but not that of the machine.
        files: the file system; the operating system's unless given.

    Raises:
        InvalidError: there is no such durability.
        UnavailableError: the folder cannot be made.

    Example:
        >>> LocalObjects("/tmp/pond").durability
        'disk'
    """

    def __init__(
        self, path: str | Path, durability: Durability = "disk", *, files: FileSystem | None = None
    ) -> None:
        if durability not in DURABILITIES:
            raise InvalidError("there is no such durability", durability=durability, known=DURABILITIES)
        self._root = str(Path(path).absolute())
        self._durability: Durability = durability
        self._files: FileSystem = files or SystemFiles()
        self._syncs = durability == "disk"
        self._lock = threading.Lock()
        self._one_sync = threading.Lock()
        self._unsynced: set[str] = set()
        self._known_folders: set[str] = set()
        self._has_lost = False
        with self._errors(""):
            self._use_folder(self._root)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (LocalObjects, (self._root, self._durability))

    def __repr__(self) -> str:
        return f"LocalObjects({self._root!r}, {self._durability!r})"

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self._root

    @property
    def durability(self) -> Durability:
        """What objects survive."""
        return self._durability

    @property
    def storage_options(self) -> Mapping[str, str]:
        """The options that other Delta readers need to open the folder: none."""
        return {}

    def put_if_absent(self, path: str, data: bytes) -> None:
        """Create the object, whole or not at all, after everything that was put before.

        Raises:
            ObjectExistsError: it exists; nothing was written by this attempt.
            UnavailableError: it may or may not have been written.
        """
        self._create(path, (data,))

    def put_unsynced(self, path: str, data: bytes) -> None:
        """As `put_if_absent`, but the object survives a power cut only after the next `sync` or synced put."""
        with self._errors(path):
            target = self._target(path)
            self._publish(path, (data,), lambda staged: self._link(staged, target))
            self._note((target, _folder_of(target)))

    def put(self, path: str, data: bytes) -> None:
        """Create or replace the object, whole or not at all, after everything that was put before."""
        with self._errors(path):
            target = self._target(path)

            def replace(staged: str) -> None:
                self._sync((staged,))
                self._files.replace(staged, target)

            self._publish(path, (data,), replace)
            self._sync((_folder_of(target),))

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Let these objects, and everything that was put through this instance, survive a power cut."""
        with self._errors(""):
            targets = [self._target(path) for path in paths]
            self._sync((*targets, *{_folder_of(target) for target in targets}))

    def get(self, path: str) -> bytes:
        """The object's bytes.

        Raises:
            ObjectMissingError: there is no such object.
        """
        with self._errors(path, _MISSING):
            return self._files.read(self._target(path))

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of the object.

        Raises:
            ObjectMissingError: there is no such object.
        """
        with self._errors(path, _MISSING):
            return self._files.read_ranges(self._target(path), ranges)

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The last bytes of the object.

        Raises:
            ObjectMissingError: there is no such object.
        """
        with self._errors(path, _MISSING):
            target = self._target(path)
            end = self._files.size_bytes(target)
            (data,) = self._files.read_ranges(target, [ByteRange(max(0, end - size_bytes), end)])
            return Tail(data, end)

    def download(self, path: str, target: Path) -> None:
        """Copy the object into another local file, piece by piece.

        Raises:
            ObjectMissingError: there is no such object.
        """
        with self._errors(path, _MISSING):
            pieces = self._files.read_pieces(self._target(path))
            first = next(pieces, b"")
        with self._errors(path), target.open("wb") as file:
            file.write(first)
            file.writelines(pieces)

    def upload(self, path: str, source: Path) -> None:
        """Create the object from another local file, piece by piece, whole or not at all.

        Raises:
            ObjectExistsError: it exists; nothing was written.
            UnavailableError: it may or may not have been written.
        """
        self._create(path, SystemFiles().read_pieces(str(source)))

    def link_from(self, other: LocalObjects, path: str) -> None:
        """Give an object of another folder a second name here, which survives a power cut after the next `sync`.

        Raises:
            ObjectExistsError: there is another object of that path here.
            OSError: there is no such object, the folders are on different disks, or the disk has no hard links.
        """
        target = self._target(path)
        self._use_folder(_folder_of(target))
        self._link(other._target(path), target)
        self._note((target, _folder_of(target)))

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        """All paths under ``prefix`` (whole path parts), sorted, greater than ``start_after``."""
        with self._errors(prefix):
            folder = self._target(prefix.rstrip("/")) if prefix else self._root
            start = len(self._root) + 1
            paths = [path[start:] for path in self._files.walk(folder) if not _is_staged(path)]
        return sorted(path for path in paths if start_after is None or path > start_after)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete the objects; missing objects are ignored. A power cut may bring them back until the next sync."""
        for path in paths:
            with self._errors(path):
                target = self._target(path)
                with suppress(*_MISSING):
                    self._files.remove(target)
                    self._note((_folder_of(target),))

    # -- how an object gets its name -------------------------------------------------------

    def _create(self, path: str, pieces: Iterable[bytes]) -> None:
        with self._errors(path):
            target = self._target(path)

            def name(staged: str) -> None:
                self._sync((staged,))
                self._link(staged, target)

            self._publish(path, pieces, name)
            self._sync((_folder_of(target),))

    def _publish(self, path: str, pieces: Iterable[bytes], name: Callable[[str], None]) -> None:
        """Write the contents under a name of their own, and let ``name`` give them the object's."""
        folder = _folder_of(self._target(path))
        self._use_folder(folder)
        try:
            staged = self._stage(path, pieces)
        except FileNotFoundError:
            # The folder was removed since it was first used.
            self._known_folders.discard(folder)
            self._use_folder(folder)
            staged = self._stage(path, pieces)
        try:
            name(staged)
        finally:
            with suppress(FileNotFoundError):
                self._files.remove(staged)

    def _stage(self, path: str, pieces: Iterable[bytes]) -> str:
        target = self._target(path)
        for number in range(1, _STAGED_MAX):
            staged = f"{target}#{number}"
            # It may be that of a process that died, or of one that writes the same object now.
            with suppress(FileExistsError):
                self._files.create(staged, pieces)
                return staged
        raise UnavailableError("too many unfinished files of one object", path=path, store=self._root)

    def _link(self, staged: str, target: str) -> None:
        try:
            self._files.link(staged, target)
        except FileExistsError as error:
            # It may be the caller's own, of an attempt that failed between its name and the name's sync;
            # that it exists is not said before it is safe.
            self._sync((target, _folder_of(target)))
            raise ObjectExistsError(
                "the object exists", path=target[len(self._root) + 1 :], store=self._root
            ) from error

    # -- what survives ---------------------------------------------------------------------

    def _use_folder(self, folder: str) -> None:
        """Make a folder, and see to it that its name survives.

        Also if it was there: the process that made it may not have synced it yet. The folders above the
        root are a store's own, and the one that has its name.
        """
        if folder in self._known_folders:
            return
        made = self._make_folders(folder)
        above = [
            *made,
            *_between(folder, self._root),
            _folder_of(self._root),
            _folder_of(_folder_of(self._root)),
        ]
        self._note({_folder_of(path) for path in made} | set(above))
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
                        errno.ENOTDIR, "there is a file where a folder has to be", path
                    ) from None
        return missing

    def _note(self, paths: Collection[str]) -> None:
        if self._syncs:
            with self._lock:
                self._unsynced.update(paths)

    def _sync(self, paths: Collection[str]) -> None:
        """Sync these paths, and all that were noted before, together."""
        if not self._syncs:
            return
        # One at a time: a second caller must not rely on files that the first is still syncing.
        with self._one_sync:
            if self._has_lost:
                raise OSError(
                    errno.EIO, "an earlier sync failed, and what it was to keep may be lost: start again"
                )
            with self._lock:
                noted, self._unsynced = self._unsynced, set()
            try:
                self._files.sync(sorted({*noted, *paths}))
            except LostWriteError:
                # The kernel reports it once, and takes the lost pages for written from then on.
                self._has_lost = True
                raise
            except BaseException:
                self._note(noted)
                raise

    # -- paths and errors ------------------------------------------------------------------

    def _target(self, path: str) -> str:
        if any(part in {"", ".", ".."} for part in path.split("/")):
            raise ValueError(f"not a path of an object: {path!r}")
        return f"{self._root}/{path}"

    @contextmanager
    def _errors(self, path: str, missing: tuple[type[OSError], ...] = ()) -> Iterator[None]:
        try:
            yield
        except (ObjectExistsError, UnavailableError):
            raise
        except missing as error:
            raise ObjectMissingError("the object is missing", path=path, store=self._root) from error
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"the object store failed{_way_out(error)}", path=path, store=self._root, cause=error
            ) from error


def _way_out(error: OSError | ValueError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return ": this user may not write there; give it the right, or take another folder"
    if number in {errno.ENOSPC, errno.EDQUOT}:
        return ": the disk is full; make room, and what waits goes on"
    return ""


def _folder_of(path: str) -> str:
    return os.path.dirname(path)  # noqa: PTH120 - paths are text here, as the hot path has them


def _between(folder: str, root: str) -> Iterator[str]:
    """A folder and those above it, up to the root."""
    while len(folder) >= len(root):
        yield folder
        folder = _folder_of(folder)


def _is_staged(path: str) -> bool:
    _, mark, number = path.rpartition("#")
    return bool(mark) and number.isdecimal()
