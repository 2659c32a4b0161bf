"""Compaction planning: which files to rewrite, size-tiered, per interval, and never out of order.

The files of an interval, oldest first, form a sequence in time: each holds the updates of supersteps
after those of the file before it. A compaction replaces a *contiguous stretch* of them by one file, so
files keep covering disjoint stretches of time and updates still combine in the right order (compacting the
first and third of three updates would put the first above the second).

Two rules bound the cost of reads, as in an LSM tree. Tiers: as soon as ``fan_in`` files of similar size
have gathered at the young end, they become one; so each row is rewritten once per tier, and a tier
holds few files. Garbage: when the young files together are half as large as the oldest, which holds
the interval's bulk, everything becomes one file and dead rows are dropped. That share differs a little from
file to file, so that intervals under the same load do not all become garbage in the same minute. This module
does no input or output.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.live_file import LiveFile
from millpond.statestore.types import Superstep

MEMORY_BYTES_MAX: Final = 1 << 26
"""Default size of the files, together, up to which a compaction runs in memory."""

_SPREAD: Final = 0.2
_CRC32_MAX: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """When files are compacted.

    Args:
        fan_in: how many files of a tier become one.
        files_max: with this many files in an interval the young files are compacted whatever their
            sizes; it bounds the files that a read of a key opens, except those added since.
        small_bytes: files up to this size are the first tier; each further tier is ``fan_in`` times larger.
        garbage_ratio: the young files are compacted into the oldest when their bytes reach this share of it,
            or up to a fifth more or less, by the oldest file's name.
        memory_bytes_max: a compaction of more bytes is merged piece by piece through the local
            disk; this bounds memory, so no compaction is too large.
    """

    fan_in: int = 8
    files_max: int = 32
    small_bytes: int = 1 << 16
    garbage_ratio: float = 0.5
    memory_bytes_max: int = MEMORY_BYTES_MAX

    def __post_init__(self) -> None:
        """Refuse bounds under which compaction never ends or never begins."""
        if self.fan_in < 2 or self.files_max < 2 or self.small_bytes < 1 or self.garbage_ratio <= 0:
            raise InvalidError("a compaction policy cannot work with these bounds", policy=self)

    def tier(self, size_bytes: int) -> int:
        """The tier of a file of ``size_bytes``.

        Example:
            >>> [CompactionPolicy().tier(size << 10) for size in (1, 64, 65, 512, 513)]
            [0, 0, 1, 1, 2]
        """
        tier, limit = 0, self.small_bytes
        while size_bytes > limit:
            tier, limit = tier + 1, limit * self.fan_in
        return tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Files of an interval that will become one.

    Attributes:
        interval: the interval that the files belong to.
        files: oldest first.
        is_complete: no older file of the interval is left, so tombstones may be dropped.
    """

    interval: Interval
    files: tuple[LiveFile, ...]
    is_complete: bool

    @property
    def size_bytes(self) -> int:
        """The bytes of the files together."""
        return sum(file.size_bytes for file in self.files)

    @property
    def superstep(self) -> Superstep:
        """The newest superstep among the files."""
        return Superstep(max(file.max_superstep or 0 for file in self.files))


def plan_compaction(
    files: Sequence[LiveFile],
    interval: Interval,
    *,
    before: Superstep,
    policy: CompactionPolicy,
    everything: bool = False,
) -> Compaction | None:
    """The compaction that the interval needs now; ``None`` when it needs none.

    Args:
        files: all live files that can hold keys of the interval.
        interval: the interval to plan for.
        before: files with rows of this superstep or a later one stay as they are: their
            productions may be undelivered, and soft state may not include them yet.
        policy: when to compact.
        everything: compact all files that may be compacted, whatever the policy says about sizes.
    """
    if any(file.max_superstep is None for file in files):
        return None
    ordered = in_order_of_time(files)
    settled = [file for file in ordered if (file.max_superstep or 0) < before]
    if any(_is_foreign(file) for file in ordered[len(settled) :]):
        # It may hold old rows next to new ones; once the superstep has passed it can be compacted too.
        return None
    # A file that may hold keys of other intervals too cannot be replaced by one of this interval.
    first = 1 + max((index for index, file in enumerate(settled) if not file.lies_in(interval)), default=-1)
    begin = _everything(settled, first) if everything else _begin(settled, first, policy)
    begin = _in_order(settled, first, begin)
    if begin is None:
        return None
    return Compaction(interval=interval, files=tuple(settled[begin:]), is_complete=begin == 0)


def in_order_of_time(files: Iterable[LiveFile]) -> list[LiveFile]:
    """Files by the supersteps of their rows, oldest first."""
    return sorted(files, key=lambda file: (file.max_superstep or 0, file.added_version, file.path))


def younger_than(compaction: Compaction, files: Sequence[LiveFile]) -> Sequence[LiveFile]:
    """The files that may be compacted while ``compaction`` is in preparation: those of later supersteps only.

    Older files stay out too: a compaction of files on both sides of a stretch would reorder them around it.
    No file qualifies if a file of another engine mixes older and younger rows.
    """
    last = compaction.superstep
    rest = [file for file in files if file not in compaction.files]
    younger = [file for file in rest if (file.max_superstep or 0) > last]
    mixed = (
        _is_foreign(file) and (file.min_superstep is None or file.min_superstep <= last) for file in rest
    )
    return [] if any(mixed) else younger


def _is_foreign(file: LiveFile) -> bool:
    return not file.interval_id


def _everything(settled: Sequence[LiveFile], first: int) -> int | None:
    return first if len(settled) - first > 1 else None


def _begin(settled: Sequence[LiveFile], first: int, policy: CompactionPolicy) -> int | None:
    sizes = [file.size_bytes for file in settled]
    count = len(sizes) - first
    if count < 2:
        return None
    if first == 0 and _is_garbage_due(settled, policy):
        return 0
    for tier in range(policy.tier(max(sizes[first:])) + 1):
        begin, in_tier = len(sizes), 0
        while begin > first and policy.tier(sizes[begin - 1]) <= tier:
            begin -= 1
            in_tier += policy.tier(sizes[begin]) == tier
        if in_tier >= policy.fan_in:
            return begin
    return first + 1 if count >= policy.files_max else None


def _is_garbage_due(settled: Sequence[LiveFile], policy: CompactionPolicy) -> bool:
    oldest, young = settled[0], settled[1:]
    is_worth_it = len(settled) > policy.fan_in or oldest.size_bytes >= policy.small_bytes
    share = policy.garbage_ratio * _spread(oldest.path)
    return is_worth_it and sum(file.size_bytes for file in young) >= share * oldest.size_bytes


def _spread(path: str) -> float:
    """A factor from 0.8 to 1.2, the same whenever it is asked for.

    Intervals of a computation grow alike; with one share for all they would be rewritten together, and until the
    retention has passed the disk would hold all of them twice.
    """
    return 1 + _SPREAD * (2 * zlib.crc32(path.encode()) / _CRC32_MAX - 1)


def _in_order(settled: Sequence[LiveFile], first: int, begin: int | None) -> int | None:
    """The last start at or before ``begin`` from which the files cover a stretch of time of their own."""
    if begin is None:
        return None
    for start in range(begin, first - 1, -1):
        if _is_stretch(settled, start):
            return start
    return None


def _is_stretch(settled: Sequence[LiveFile], start: int) -> bool:
    if start == 0:
        return True
    older = settled[start - 1].max_superstep or 0
    return all(
        not _is_foreign(file) or (file.min_superstep is not None and file.min_superstep > older)
        for file in settled[start:]
    )
