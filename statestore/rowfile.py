"""
Row files: the Parquet files that hold row updates (MillWheel §7.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.statestore.types import CommitNumber, Sequencer, Superstep

__all__ = ["RowFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """
    A row file that has been written and waits to be named in a commit.

    Args:
        path: where it lies, relative to the table's root and not URL-encoded.
        size_bytes: its length.
        rows: how many row updates it holds.
        min_key: its least key.
        max_key: its greatest key.
        superstep: the superstep that wrote it.
        sequencer: the lease under which it was written.
        commit_number: the commit of that lease which it belongs to.
        productions: how many productions it carries.
    """

    path: str
    size_bytes: int
    rows: int
    min_key: str
    max_key: str
    superstep: Superstep
    sequencer: Sequencer
    commit_number: CommitNumber
    productions: int
