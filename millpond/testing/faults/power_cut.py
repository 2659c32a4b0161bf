"""A file system that loses unsynced data at a power cut, as POSIX allows.

`PowerCutFiles` is a `FileSystem` in memory that keeps two things apart: the view of processes, and the content of the disk.
Only `PowerCutFiles.sync` moves anything from the one to the other. `PowerCutFiles.cut_power` then draws, for each
name and each file alone, how far the operating system had come: names appear without contents, tails are missing,
a newer name is there and an older one is not, and a removed file is back.

Example:
    >>> files = PowerCutFiles()
    >>> files.create("/a", [b"synced"]); files.create("/b", [b"not synced"])
    >>> files.sync(["/a", "/"])
    >>> files.cut_power(lambda choices: 0)  # the operating system had written nothing of its own accord
    >>> files.read("/a"), files.read("/b")
    (b'synced', b'')
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from millpond.statestore.objects.ranges import ByteRange, Tail

CHANGES: Final = ("create", "link", "replace", "remove", "make_folder", "sync")
"""The calls that `PowerCutFiles.before` is told of."""


class _File:
    __slots__ = ("contents", "on_disk")

    def __init__(self, contents: bytes) -> None:
        self.contents = contents
        self.on_disk = b""


class _Folder:
    __slots__ = ("changed", "names")

    def __init__(self) -> None:
        self.names: dict[str, _Node] = {}
        # Of each name that changed since the last sync: what it has meant, from what is on the disk on.
        self.changed: dict[str, list[_Node | None]] = {}

    def set(self, name: str, node: _Node | None) -> None:
        self.changed.setdefault(name, [self.names.get(name)]).append(node)
        if node is None:
            del self.names[name]
        else:
            self.names[name] = node


_Node: TypeAlias = _File | _Folder


class PowerCutFiles:
    """A file system in memory whose power can be cut; for one thread at a time.

    Attributes:
        before: called with the name of the call (`CHANGES`) and a path before each change and before each path of a
            sync; what it raises leaves the change undone.
    """

    def __init__(self) -> None:
        self._root = _Folder()
        self.before: Callable[[str, str], None] = _nothing

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        """Create a file; neither its contents nor its name are on the disk."""
        self.before("create", path)
        folder, name = self._place(path)
        if name in folder.names:
            raise FileExistsError(path)
        folder.set(name, _File(b"".join(pieces)))

    def read(self, path: str) -> bytes:
        """A file's contents, on the disk or not."""
        return self._file(path).contents

    def read_pieces(self, path: str) -> Iterator[bytes]:
        """A file's contents as one piece."""
        yield self.read(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Parts of a file's contents."""
        contents = self.read(path)
        return [contents[part.start : part.end] for part in ranges]

    def read_tail(self, path: str, size_bytes: int) -> Tail:
        """The end of a file's contents."""
        contents = self.read(path)
        return Tail(contents[-size_bytes:], len(contents))

    def link(self, source: str, target: str) -> None:
        """Give a file a second name."""
        self.before("link", target)
        file = self._file(source)
        folder, name = self._place(target)
        if name in folder.names:
            raise FileExistsError(target)
        folder.set(name, file)

    def replace(self, source: str, target: str) -> None:
        """Rename a file; a power cut may leave both names, or neither."""
        self.before("replace", target)
        file = self._file(source)
        folder, name = self._place(target)
        folder.set(name, file)
        folder, name = self._place(source)
        folder.set(name, None)

    def remove(self, path: str) -> None:
        """Remove a file's name."""
        self.before("remove", path)
        self._file(path)
        folder, name = self._place(path)
        folder.set(name, None)

    def make_folder(self, path: str) -> None:
        """Make one folder; its name is not on the disk."""
        self.before("make_folder", path)
        folder, name = self._place(path)
        if name in folder.names:
            raise FileExistsError(path)
        folder.set(name, _Folder())

    def is_folder(self, path: str) -> bool:
        """Return True if the path is a folder."""
        return isinstance(self._find(path), _Folder)

    def walk(self, folder: str) -> Iterator[str]:
        """The paths of all files below a folder."""
        found = self._find(folder)
        if isinstance(found, _Folder):
            yield from _walk(found, folder.rstrip("/"))

    def sync(self, paths: Collection[str]) -> None:
        """Write the contents of files and the names in folders to the disk, one after the other."""
        for path in paths:
            self.before("sync", path)
            match self._find(path):
                case _File() as file:
                    file.on_disk = file.contents
                case _Folder() as folder:
                    folder.changed.clear()
                case None:
                    continue

    def cut_power(self, choose: Callable[[int], int]) -> None:
        """Forget all unsynced data, except the part that the operating system happens to have written.

        Args:
            choose: given the number of possible outcomes, returns the one that happens, from 0; 0 is
                always that nothing was written.
        """
        _cut(self._root, choose, set())

    def _find(self, path: str) -> _Node | None:
        node: _Node | None = self._root
        for name in path.split("/"):
            if name:
                node = node.names.get(name) if isinstance(node, _Folder) else None
        return node

    def _place(self, path: str) -> tuple[_Folder, str]:
        above, _, name = path.rpartition("/")
        folder = self._find(above)
        if isinstance(folder, _File):
            raise NotADirectoryError(path)
        if folder is None:
            raise FileNotFoundError(path)
        return folder, name

    def _file(self, path: str) -> _File:
        match self._find(path):
            case _File() as file:
                return file
            case _Folder():
                raise IsADirectoryError(path)
            case None:
                raise FileNotFoundError(path)


def _walk(folder: _Folder, path: str) -> Iterator[str]:
    for name, node in folder.names.items():
        if isinstance(node, _Folder):
            yield from _walk(node, f"{path}/{name}")
        else:
            yield f"{path}/{name}"


def _cut(folder: _Folder, choose: Callable[[int], int], seen: set[int]) -> None:
    for name, meanings in folder.changed.items():
        node = meanings[choose(len(meanings))]
        if node is None:
            folder.names.pop(name, None)
        else:
            folder.names[name] = node
    folder.changed.clear()
    for node in folder.names.values():
        if isinstance(node, _Folder):
            _cut(node, choose, seen)
        elif id(node) not in seen:
            # A file of two names has lost the same under both.
            seen.add(id(node))
            _tear(node, choose)


def _tear(file: _File, choose: Callable[[int], int]) -> None:
    whole, on_disk = file.contents, file.on_disk
    if on_disk is not whole:
        half = len(whole) // 2
        outcomes = (on_disk, whole, whole[:half], whole[:half] + bytes(len(whole) - half), bytes(len(whole)))
        file.contents = file.on_disk = outcomes[choose(len(outcomes))]


def _nothing(_call: str, _path: str) -> None:
    return
