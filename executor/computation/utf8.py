"""Text of users that may hold half a character: a lone surrogate has no UTF-8 form."""

from __future__ import annotations


def has_utf8(text: str) -> bool:
    """Whether a text has a UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """A text that every output can carry: a lone surrogate is shown as its number."""
    return text.encode(errors="backslashreplace").decode()
