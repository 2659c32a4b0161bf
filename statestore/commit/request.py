"""The request for a commit: intervals, files and positions that change together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.row import Fence
from millpond.statestore.types import EventTimeMicros


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalWrite:
    """One interval's part of a commit.

    Args:
        interval: the interval.
        fence: its new sequencer and commit number; it must follow the stored fence.
        added: row files written for this commit.
        removed: paths of live files that the added ones replace.
        watermark: the interval's input low watermark, journaled in the commit.
    """

    interval: Interval
    fence: Fence
    added: tuple[RowFile, ...] = ()
    removed: tuple[str, ...] = ()
    watermark: EventTimeMicros | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """All changes of one commit.

    Equal requests are the same commit: repeating one after `OutcomeUnknownError` is safe.

    Args:
        kind: the purpose: "superstep", "fence", "compaction", …
        writes: the touched intervals.
        positions: other Delta transactions: inputs and supersteps by application id.
        metadata: for readers of the log; stored in ``commitInfo.millpond``.
        renames: computations whose files become those of another, old name to new. The request writes every
            interval of both.
        source_offsets: by the application id of an input, where its position lies in the source. Each commit repeats
            those of the commits before it.
        drops: computations whose files are removed. The request writes every interval of theirs.
    """

    kind: str
    writes: tuple[IntervalWrite, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()
    source_offsets: Mapping[str, str] = field(default_factory=dict)
