"""Queries in SQL on a command line: the files that they may reach, and the errors of their author."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from textwrap import indent
from typing import Final

import duckdb

from millpond.cli.terminal.options import flag
from millpond.statestore.errors import InvalidError

allow_files_option: Final = flag(
    "--allow-files",
    "Let the query read and write files, attach databases, load extensions and change settings.",
)


@contextmanager
def told_of_query(tables: Iterable[str]) -> Iterator[None]:
    """Turn an error of DuckDB into one that names the tables, and the option if the query needs it."""
    try:
        yield
    except duckdb.Error as error:
        reason, _, more = str(error).strip().partition("\n")
        is_confined = "configuration has been locked" in reason or (
            "disabled" in reason and "configuration" in reason
        )
        way_out = "; --allow-files lets a query reach files" if is_confined else ""
        refused = InvalidError(
            f"the query was refused: {reason}{way_out}", tables=", ".join(tables) or "none has rows yet"
        )
        if more.strip():
            # Indented, because the text may quote a value, whose lines would look like ours.
            refused.add_note(indent(more.strip("\n"), "  "))
        raise refused from error
