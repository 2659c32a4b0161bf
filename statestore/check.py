"""
Assertions that stay on in production.

``assert`` vanishes under ``python -O``; the facts that commits rest on must not.
"""

from __future__ import annotations

from millpond.statestore.errors import InternalError

__all__ = ["check"]


def check(condition: bool, message: str, **details: object) -> None:
    """
    Raise `InternalError` unless ``condition`` holds.

    Args:
        condition: the fact that must hold.
        message: one lower-case line naming the fact that did not.
        details: values for the error, printed as ``key=`value` `` pairs.

    Raises:
        InternalError: the condition is false, so there is a bug in Millpond.
    """
    if not condition:
        raise InternalError(message, **details)
