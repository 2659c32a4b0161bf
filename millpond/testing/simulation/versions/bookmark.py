"""Bookmarks: all knowledge outside the engine of a version, for when a store goes back to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millpond.statestore.interval import Interval
from millpond.testing.simulation.workload import RowVersion, Workload

if TYPE_CHECKING:
    from millpond.testing.simulation.publisher import Published

Rows = Mapping[str, Mapping[str, RowVersion]]
"""Rows by computation and key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What the auditor knows of a version.

    Attributes:
        version: the version.
        rows: its rows, by computation and key.
        in_flight: productions that no consumer has consumed then.
        live: its files.
        fences: the packed fence of each interval.
        cover: the live intervals.
        positions: all transactions except the intervals'.
        watermarks: of the intervals.
        known: the numbers that each key's row updates have had.
    """

    version: int
    rows: Rows
    in_flight: tuple[tuple[str, str, Any, int], ...]
    live: frozenset[str]
    fences: Mapping[Interval, int]
    cover: frozenset[Interval]
    positions: Mapping[str, int]
    watermarks: Mapping[str, int]
    known: Mapping[tuple[str, str], frozenset[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookmark:
    """A version, with the knowledge of auditor, workload and publishers when it landed."""

    audited: Audited
    workload: Workload
    published: Published

    @property
    def version(self) -> int:
        """The version."""
        return self.audited.version

    @property
    def superstep(self) -> int:
        """The last superstep of the pipeline, whose productions are undelivered at that version; 0 before the first."""
        prefix = "millpond/superstep/"
        return max((at for app, at in self.audited.positions.items() if app.startswith(prefix)), default=0)
