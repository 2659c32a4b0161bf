"""Violations: promises that did not hold."""

from __future__ import annotations


class Violation(AssertionError):  # noqa: N818 - the paper trail says "violation"
    """A promise of docs/safety.md did not hold.

    Args:
        promise: its number, such as ``I4``.
        message: the observation.
    """

    def __init__(self, promise: str, message: str) -> None:
        super().__init__(f"{promise}: {message}")
        self.promise = promise


def must(holds: bool, promise: str, message: str, **details: object) -> None:
    """Raise `Violation` unless the promise holds."""
    if not holds:
        pairs = " ".join(f"{name}=`{value}`" for name, value in details.items())
        raise Violation(promise, f"{message} {pairs}".rstrip())
