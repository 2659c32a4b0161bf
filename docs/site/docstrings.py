"""Docstrings on their way into the reference.

The code's docstrings are written for readers of the code: ``Example::`` stands before an indented example, and a
public name stands in plain backticks. Here examples become blocks of Python, and names become links.
"""

from __future__ import annotations

import re
import textwrap
from functools import lru_cache
from typing import Any, Final

import griffe

_EXAMPLE: Final = re.compile(
    r"^(?P<title>[^\n]*?)::\n\n(?P<code>(?:[ ]{4}[^\n]*\n|\n)*[ ]{4}[^\n]*)", re.MULTILINE
)
_EXAMPLES: Final = re.compile(r"^Example:$", re.MULTILINE)
_NAME: Final = re.compile(r"(?<![`\[])`([A-Za-z_][\w.]*)`(?![`\]])")


class ReadableDocstrings(griffe.Extension):
    """Turns examples into blocks and public names into links."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            names = _public(loader)
            text = _EXAMPLES.sub("Examples:", obj.docstring.value.replace("``", "\0"))
            text = _EXAMPLE.sub(_as_block, text)
            obj.docstring.value = _NAME.sub(lambda found: _link(found, names), text).replace("\0", "`")


@lru_cache(maxsize=1)
def _public_of(exports: tuple[str, ...]) -> frozenset[str]:
    return frozenset(exports)


def _public(loader: griffe.GriffeLoader) -> frozenset[str]:
    package = loader.modules_collection.members.get("millpond")
    exports = getattr(package, "exports", None) or ()
    return _public_of(tuple(str(name) for name in exports))


def _as_block(example: re.Match[str]) -> str:
    title, code = example["title"], textwrap.dedent(example["code"])
    return f"{title}:\n\n```python\n{code}\n```" if title else f"```python\n{code}\n```"


def _link(found: re.Match[str], names: frozenset[str]) -> str:
    name = found[1]
    return f"[`{name}`][millpond.{name}]" if name in names else found.group()
