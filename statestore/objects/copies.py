"""Copies of objects that a store keeps nearer to the reader, and how a reader that was given wrong bytes is rid of one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from millpond.statestore.types import Objects


@runtime_checkable
class CopyingObjects(Protocol):
    """An object store that keeps copies of objects of the store below it."""

    def forget(self, path: str) -> bool:
        """Remove the copy of an object, so that it is next read from the store below.

        Returns:
            Whether there was one.
        """
        ...


def forget_copy(objects: Objects, path: str) -> bool:
    """Remove the copy of an object whose bytes are wrong.

    Returns:
        Whether there was one: to read the object again may then give other bytes.

    Example:
        >>> from millpond.statestore.objects.memory import MemoryObjects
        >>> forget_copy(MemoryObjects(), "a")
        False
    """
    return isinstance(objects, CopyingObjects) and objects.forget(path)
