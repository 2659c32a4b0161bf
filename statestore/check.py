"""Assertions that stay on in production.

``python -O`` removes ``assert``; the facts that commits rest on must stay checked.

`Closeable`: a context manager that closes itself at the end of its block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from millpond.statestore.errors import InternalError

if TYPE_CHECKING:
    from types import TracebackType


def check(condition: bool, message: str, **details: object) -> None:
    """Raise `InternalError` unless ``condition`` holds.

    Args:
        condition: the fact that must hold.
        message: one lower-case line that states the required fact.
        details: values for the error, printed as ``key=`value` `` pairs.

    Raises:
        InternalError: the condition is false, so there is a bug in Millpond.
    """
    if not condition:
        raise InternalError(message, **details)


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
