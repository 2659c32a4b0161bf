r"""Text from outside, shown in errors, logs and tables so that it moves no cursor, forges no line and shows no password.

Keys, states, names, paths and messages of user code come from whoever wrote the records. A terminal obeys control
characters among them, and a line break in a log line looks like the next line. They are shown as Python writes them:
``\x1b``, ``\n``, ``\u202e``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final

CHARACTERS_MAX: Final = 2_000
"""Values in errors and log lines are cut after as many characters."""

_HIDDEN: Final = (
    "\x00-\x1f\x7f-\x9f\xad"  # C0, DEL, C1, soft hyphen
    "\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"  # bidirectional marks, zero width
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff"  # line ends, annotations, tags, halves
)
_ONE_LINE: Final = re.compile(f"[{_HIDDEN}]")
_LINES: Final = re.compile(f"(?!\n)[{_HIDDEN}]")


_NAME_OF_SECRET: Final = r"[\w.-]*(?:passw|pwd|secret|token|credential|signature)[\w.-]*"  # noqa: S105 - a pattern
_PASSWORD: Final = re.compile(r"(://[^:@/?#\s]*):\S*@")
_IN_QUERY: Final = re.compile(
    rf"([?&;](?:{_NAME_OF_SECRET}|[\w.-]*key|[\w.-]*auth|sig|code)=)[^&;#\s`'\"]+", re.IGNORECASE
)
_ASSIGNED: Final = re.compile(rf"\b({_NAME_OF_SECRET}=)[^&;,\s`'\"]+", re.IGNORECASE)
_OPTION: Final = re.compile(rf"{_NAME_OF_SECRET}|.*(?:key|auth|sas)\b.*", re.IGNORECASE)
_HIDDEN_VALUE: Final = "***"


def without_secrets(text: str) -> str:
    """Return a text whose URLs and assignments have no passwords, tokens, keys and signatures.

    Example:
        >>> without_secrets("no answer from postgresql://shop:pa@ss@db/x?sslpassword=p&sslmode=require")
        'no answer from postgresql://shop:***@db/x?sslpassword=***&sslmode=require'
    """
    if "://" in text:
        text = _PASSWORD.sub(rf"\1:{_HIDDEN_VALUE}@", text)
    if "=" in text:
        text = _ASSIGNED.sub(rf"\1{_HIDDEN_VALUE}", _IN_QUERY.sub(rf"\1{_HIDDEN_VALUE}", text))
    return text


def options_without_secrets(options: Mapping[str, object]) -> dict[str, str]:
    """Return options for an error or a log, with the values of secret ones hidden.

    Example:
        >>> options_without_secrets({"aws_secret_access_key": "s", "aws_region": "x"})
        {'aws_secret_access_key': '***', 'aws_region': 'x'}
    """
    return {
        name: _HIDDEN_VALUE if _OPTION.fullmatch(name) else without_secrets(str(value))
        for name, value in options.items()
    }


def visible(value: object, characters_max: int | None = None) -> str:
    r"""Return a value as one line of text without characters that a terminal obeys or hides.

    Example:
        >>> visible("a\x1b[2Jb\nc")
        'a\\x1b[2Jb\\nc'
        >>> visible("abcdef", 3)
        'abc… (6 characters)'
    """
    text = str(value)
    if characters_max is not None and len(text) > characters_max:
        text = f"{text[:characters_max]}… ({len(text):,} characters)"
    return text if text.isprintable() else _ONE_LINE.sub(_escaped, text)


def visible_value(value: object) -> str:
    """Return a value for an error or a log: one line, without secrets, of at most `CHARACTERS_MAX` characters."""
    return visible(without_secrets(str(value)), CHARACTERS_MAX)


def visible_lines(text: str) -> str:
    """Return a text of several lines, such as a trace, with its line breaks."""
    return _LINES.sub(_escaped, text)


def visible_json(text: str) -> str:
    """Return JSON text that means the same without characters that a terminal obeys."""
    return _LINES.sub(_in_json, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


def _in_json(found: re.Match[str]) -> str:
    code = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{code[start : start + 4]}" for start in range(0, len(code), 4))


def _make_visible(record: logging.LogRecord) -> bool:
    """Show the arguments of a log record, and its trace; numbers stay, so that formats like ``%d`` work."""
    if not record.args:
        record.msg = visible(without_secrets(str(record.msg)))
    elif isinstance(record.args, tuple):
        record.args = tuple(map(_argument, record.args))
    else:
        record.args = {name: _argument(value) for name, value in record.args.items()}
    if record.exc_info and not record.exc_text:
        record.exc_text = visible_lines(without_secrets(_FORMATTER.formatException(record.exc_info)))
    return True


def _argument(value: object) -> object:
    return value if isinstance(value, int | float) else visible_value(value)


_FORMATTER: Final = logging.Formatter()


def show_in(logger: logging.Logger) -> None:
    """Make all that a logger writes visible; loggers below it are asked for by themselves."""
    if _make_visible not in logger.filters:
        logger.addFilter(_make_visible)


show_in(logging.getLogger("millpond"))
