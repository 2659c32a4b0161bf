"""An object store in memory, for tests and the simulator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Final

from millpond.statestore.errors import ObjectExistsError, ObjectMissingError

_memory_numbers: Final = itertools.count()


class MemoryObjects:
    """`Objects` in a dictionary, reachable through this instance only."""

    def __init__(self, name: str | None = None) -> None:
        self._url = f"memory://{next(_memory_numbers) if name is None else name}"
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, path: str, data: bytes) -> None:
        with self._lock:
            if path in self._objects:
                raise ObjectExistsError("the object exists", path=path, store=self._url)
            self._objects[path] = bytes(data)

    def put_unsynced(self, path: str, data: bytes) -> None:
        self.put_if_absent(path, data)

    def sync(self, paths: Iterable[str] = ()) -> None:
        """Do nothing: no object survives the process."""

    def put(self, path: str, data: bytes) -> None:
        with self._lock:
            self._objects[path] = bytes(data)

    def get(self, path: str) -> bytes:
        try:
            return self._objects[path]
        except KeyError as error:
            raise ObjectMissingError("the object is missing", path=path, store=self._url) from error

    def list(self, prefix: str, start_after: str | None = None) -> Sequence[str]:
        folder = prefix.rstrip("/") + "/" if prefix else ""
        with self._lock:
            paths = [path for path in self._objects if path.startswith(folder)]
        return sorted(path for path in paths if start_after is None or path > start_after)

    def delete(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                self._objects.pop(path, None)
