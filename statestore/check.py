"""Assertions that stay on in production.

``python -O`` removes ``assert``; the facts that commits rest on must stay checked.
"""

from __future__ import annotations

from millpond.statestore.errors import InternalError


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
