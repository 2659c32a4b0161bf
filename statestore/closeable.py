"""`Closeable`: a context manager that closes itself at the end of its block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType


class Closeable(ABC):
    """Base of resources that callers use in a ``with`` statement; the end of the block calls `close`."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Release what the object holds; closing again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
