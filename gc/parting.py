"""Parting: rewrite files that hold keys of several intervals, as after a split, into one file for each interval.

A split leaves files where they are, and each part reads them by range (MillWheel §7.1). Until they are gone, the parts carry
each other's rows along and none can be compacted completely. A parting reads a stretch of such files once for each
part, as a compaction does, and replaces it by one file of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from millpond.gc.compaction import Compaction, in_order_of_time
from millpond.statestore.interval import Interval, locate
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import Superstep


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Files, oldest first, that will be replaced by one for each interval that they hold keys of.

    Attributes:
        parts: for each interval, the same files, and whether none of its other files is older.
    """

    files: tuple[LiveFile, ...]
    parts: tuple[Compaction, ...]


def plan_parting(
    files: Sequence[LiveFile], intervals: Sequence[Interval], *, before: Superstep
) -> Parting | None:
    """Return the oldest stretch of files to part, or ``None`` if none can be parted now.

    A stretch belongs to one former interval, so its files lie next to each other in time in each part of it. ``intervals`` are
    the computation's live intervals in key order; files with rows of superstep ``before`` or a later one stay.
    """
    ordered = in_order_of_time(files)
    lows = [interval.low for interval in intervals]
    first = next((at for at, file in enumerate(ordered) if _is_shared(file, lows)), None)
    if first is None or any(file.max_superstep is None or not file.interval_id for file in ordered):
        # A file that another engine rewrote mixes old rows with new ones, so no stretch of time is certain.
        return None
    former = Interval.from_app_id(ordered[first].interval_id)
    heirs = [interval for interval in intervals if former is not None and former.overlaps(interval)]
    near = (file for file in ordered[first:] if any(file.overlaps(interval) for interval in heirs))
    stretch = [*takewhile(lambda file: _belongs(file, ordered[first].interval_id, before), near)]
    while stretch and not _is_shared(stretch[-1], lows):
        stretch.pop()
    if not stretch:
        return None
    parts = tuple(
        Compaction(
            interval=interval,
            files=tuple(stretch),
            is_complete=not any(file.overlaps(interval) for file in ordered[:first]),
        )
        for interval in heirs
        if any(file.overlaps(interval) for file in stretch)
    )
    return Parting(files=tuple(stretch), parts=parts)


def _belongs(file: LiveFile, interval_id: str, before: Superstep) -> bool:
    return file.interval_id == interval_id and (file.max_superstep or 0) < before


def _is_shared(file: LiveFile, lows: Sequence[str]) -> bool:
    """Return True if a file may hold keys of more than one of the intervals that begin at ``lows``."""
    if len(lows) < 2 or file.min_key is None or file.max_key is None:
        return len(lows) > 1
    return locate(lows, file.min_key) != locate(lows, file.max_key)
