"""Compactions and partings: rewrite files of an interval into one file with one row per key, without garbage.

The new rows carry the newest contributing (sequencer, commit number, superstep), so they keep their order relative to
all other updates of their keys. A compaction drops overridden updates, delivered productions (from all supersteps before
the last one, MillWheel §6.1.2), record ids that no sender may repeat any more, and, if no older file of the interval
is left, tombstones and empty rows.

Planning is size-tiered, as in an LSM tree: ``fan_in`` files of similar size at the young end become one, and when the young
files together are half as large as the oldest, all become one. A compaction replaces a *contiguous stretch* of files
in time: compacting the first and third of three updates would put the first above the second.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.arguments import check_count, check_number
from millpond.statestore.errors import InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval, locate
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.rules import IntervalWrite
from millpond.statestore.rows.files import (
    PARQUET,
    RowFile,
    RowFileWriter,
    Run,
    join_updates,
    open_runs,
    read_row_files,
    scratch_folder,
    write_row_file,
)
from millpond.statestore.rows.merge import combine_updates, nulls, with_whole_sums
from millpond.statestore.rows.record_ids import IdRetention
from millpond.statestore.rows.row import ROW_SCHEMA, Fence, has_state, lengths_of, lists_of
from millpond.statestore.rows.row_format import COMPACTED_PAGED_BYTES_MIN, ParquetRowFormat, RowFormat
from millpond.statestore.rows.state_schema import (
    is_typed_column,
    production_columns_among,
)
from millpond.statestore.types import Objects, Superstep

# Default size of all files together up to which a compaction runs in memory.
MEMORY_BYTES_MAX: Final = 1 << 26
_SPREAD: Final = 0.2
_CRC32_MAX: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPolicy:
    """The conditions under which files are compacted.

    Args:
        fan_in: the number of files of a tier that become one.
        files_max: with this many files in an interval the young files are compacted whatever their
            sizes; it bounds the files that a read of a key opens, except files added since.
        small_bytes: files up to this size are the first tier; each further tier is ``fan_in`` times larger.
        garbage_ratio: the young files are compacted into the oldest when their bytes reach this share of it,
            or up to a fifth more or less, depending on the oldest file's name.
        memory_bytes_max: a compaction of more bytes is merged piece by piece through the local
            disk; this bounds memory, so no compaction is too large.
    """

    fan_in: int = 8
    files_max: int = 32
    small_bytes: int = 1 << 16
    garbage_ratio: float = 0.5
    memory_bytes_max: int = MEMORY_BYTES_MAX

    def __post_init__(self) -> None:
        check_count("fan_in", self.fan_in, least=2)
        check_count("files_max", self.files_max, least=2)
        check_count("small_bytes", self.small_bytes)
        check_number("garbage_ratio", self.garbage_ratio, least=0)
        check_count("memory_bytes_max", self.memory_bytes_max, least=0)
        if not self.garbage_ratio:
            raise InvalidError("garbage_ratio must be above 0", garbage_ratio=self.garbage_ratio)

    def tier(self, size_bytes: int) -> int:
        """Return the tier of a file of ``size_bytes``.

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
    """Files of an interval that will become one, oldest first.

    It is complete if no older file of the interval is left, so that tombstones may be dropped.
    """

    interval: Interval
    files: tuple[LiveFile, ...]
    is_complete: bool

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def superstep(self) -> Superstep:
        return Superstep(max(file.max_superstep or 0 for file in self.files))


def plan_compaction(
    files: Sequence[LiveFile],
    interval: Interval,
    *,
    before: Superstep,
    policy: CompactionPolicy,
    everything: bool = False,
) -> Compaction | None:
    """Return the compaction that the interval needs now, or ``None`` when it needs none.

    Files with rows of superstep ``before`` or a later one stay: their productions may be undelivered, and soft state
    may not include them yet. ``everything`` compacts all files that may be compacted, whatever their sizes.
    """
    if any(file.max_superstep is None for file in files):
        return None
    ordered = in_order_of_time(files)
    settled = [file for file in ordered if (file.max_superstep or 0) < before]
    if any(not file.interval_id for file in ordered[len(settled) :]):
        # Another engine's file may hold old rows next to new ones; it can be compacted once the superstep has passed.
        return None
    # A file that may hold keys of other intervals too cannot be replaced by one of this interval.
    first = 1 + max((index for index, file in enumerate(settled) if not file.lies_in(interval)), default=-1)
    begin = _begin(settled, first, policy, everything=everything)
    # Updates combine in the order of files, so start where the files cover a contiguous stretch of time.
    starts = () if begin is None else range(begin, first - 1, -1)
    begin = next((start for start in starts if _is_stretch(settled, start)), None)
    if begin is None:
        return None
    return Compaction(interval=interval, files=tuple(settled[begin:]), is_complete=begin == 0)


def in_order_of_time(files: Iterable[LiveFile]) -> list[LiveFile]:
    return sorted(files, key=lambda file: (file.max_superstep or 0, file.added_version, file.path))


def younger_than(compaction: Compaction, files: Sequence[LiveFile]) -> Sequence[LiveFile]:
    """Return the files of later supersteps only, which may be compacted while ``compaction`` is in preparation.

    Older files stay out too: a compaction of files on both sides of a stretch would reorder them around it.
    """
    last = compaction.superstep
    rest = [file for file in files if file not in compaction.files]
    younger = [file for file in rest if (file.max_superstep or 0) > last]
    # A file of another engine may mix older and younger rows, and would then be reordered around the stretch.
    mixed = (
        not file.interval_id and (file.min_superstep is None or file.min_superstep <= last) for file in rest
    )
    return [] if any(mixed) else younger


def _begin(
    settled: Sequence[LiveFile], first: int, policy: CompactionPolicy, *, everything: bool
) -> int | None:
    sizes = [file.size_bytes for file in settled]
    count = len(sizes) - first
    if count < 2:
        return None
    if everything:
        return first
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
    # Intervals of a computation grow alike. With one share for all they would be rewritten together, and until the
    # retention has passed the disk would hold all of them twice.
    spread = 1 + _SPREAD * (2 * zlib.crc32(oldest.path.encode()) / _CRC32_MAX - 1)
    share = policy.garbage_ratio * spread
    return is_worth_it and sum(file.size_bytes for file in young) >= share * oldest.size_bytes


def _is_stretch(settled: Sequence[LiveFile], start: int) -> bool:
    if start == 0:
        return True
    older = settled[start - 1].max_superstep or 0
    return all(
        file.interval_id or (file.min_superstep is not None and file.min_superstep > older)
        for file in settled[start:]
    )


def plan_parting(
    files: Sequence[LiveFile], intervals: Sequence[Interval], *, before: Superstep
) -> tuple[Compaction, ...]:
    """Return the oldest stretch of files to part, once for each interval that holds their keys; else nothing.

    A stretch belongs to one former interval, so its files lie next to each other in time in each part of it.
    ``intervals`` are the computation's live intervals in key order; files with rows of superstep ``before``
    or a later one stay.
    """
    ordered = in_order_of_time(files)
    lows = [interval.low for interval in intervals]
    first = next((at for at, file in enumerate(ordered) if _is_shared(file, lows)), None)
    if first is None or any(file.max_superstep is None or not file.interval_id for file in ordered):
        # A file that another engine rewrote mixes old rows with new ones, so no stretch of time is certain.
        return ()
    former_id = ordered[first].interval_id
    former = Interval.from_app_id(former_id)
    heirs = [interval for interval in intervals if former is not None and former.overlaps(interval)]
    near = (file for file in ordered[first:] if any(file.overlaps(interval) for interval in heirs))
    stretch = [
        *takewhile(lambda file: file.interval_id == former_id and (file.max_superstep or 0) < before, near)
    ]
    while stretch and not _is_shared(stretch[-1], lows):
        stretch.pop()
    return tuple(
        Compaction(
            interval=interval,
            files=tuple(stretch),
            is_complete=not any(file.overlaps(interval) for file in ordered[:first]),
        )
        for interval in heirs
        if any(file.overlaps(interval) for file in stretch)
    )


def _is_shared(file: LiveFile, lows: Sequence[str]) -> bool:
    if len(lows) < 2 or file.min_key is None or file.max_key is None:
        return len(lows) > 1
    return locate(lows, file.min_key) != locate(lows, file.max_key)


_STREAMED_BYTES: Final = 1 << 27
# The least that a compaction through the disk decodes of one file at a time.
_BATCH_BYTES_MIN: Final = 1 << 20
# Read by key until the next compaction, so even small files have a page index.
_COMPACTED: Final = ParquetRowFormat(COMPACTED_PAGED_BYTES_MIN)
_Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRules:
    """Data to keep: productions of ``pending_from`` and later, which may be undelivered, and record ids."""

    pending_from: Superstep
    ids: IdRetention


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """A compaction that is prepared but not committed; ``file`` is ``None`` when none of the rows is still needed."""

    compaction: Compaction
    file: RowFile | None

    def write(self, fence: Fence) -> IntervalWrite:
        added: tuple[RowFile, ...] = ()
        if self.file is not None:
            added = (replace(self.file, sequencer=fence.sequencer, commit_number=fence.commit_number),)
        return IntervalWrite(
            interval=self.compaction.interval,
            fence=fence,
            added=added,
            removed=tuple(file.path for file in self.compaction.files),
        )

    @property
    def freed_bytes(self) -> int:
        before = sum(file.size_bytes for file in self.compaction.files)
        return before - (0 if self.file is None else self.file.size_bytes)


def compact_files(
    objects: Objects,
    compaction: Compaction,
    rules: CompactionRules,
    *,
    fence: Fence,
    token: str,
    row_format: RowFormat = PARQUET,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    scratch: str | None = None,
) -> Compacted:
    """Read the files of a compaction and write their replacement; nothing is committed.

    Files of more than ``memory_bytes_max`` together are merged through the local disk (Parquet only), in
    memory that does not grow with them; the result is equivalent. ``scratch`` needs room for the old files
    and the new one; by default it is the system's temporary folder. ``fence`` is the owner's last or next
    one, and no row may be newer.
    """
    is_parquet = isinstance(row_format, ParquetRowFormat)
    if compaction.size_bytes > memory_bytes_max and is_parquet:
        with scratch_folder("compact in", scratch) as folder:
            runs = _open(objects, compaction, folder)
            reach("compaction.read")
            writer = RowFileWriter(
                folder, compaction.interval, superstep=compaction.superstep, fence=fence, token=token
            )
            with closing(writer):
                for updates in stretches(runs):
                    writer.write(compact_updates(updates, rules, is_complete=compaction.is_complete))
                merged = writer.finish(objects)
        reach("compaction.file_written")
        return Compacted(compaction=compaction, file=merged)
    paths = [file.path for file in compaction.files]
    updates = read_row_files(objects, paths, interval=compaction.interval, keeps_cells=True)
    reach("compaction.read")
    rows = compact_updates(updates, rules, is_complete=compaction.is_complete)
    if not rows.num_rows:
        return Compacted(compaction=compaction, file=None)
    file = write_row_file(
        objects,
        compaction.interval,
        rows,
        superstep=compaction.superstep,
        fence=fence,
        token=token,
        row_format=_COMPACTED if is_parquet else row_format,
    )
    # Another process may commit the file, and a process can only sync its own files.
    objects.sync()
    reach("compaction.file_written")
    return Compacted(compaction=compaction, file=file)


def _open(objects: Objects, compaction: Compaction, folder: Path) -> list[Run]:
    batch_bytes = max(_BATCH_BYTES_MIN, _STREAMED_BYTES // len(compaction.files))
    runs: list[Run] = []
    for number, file in enumerate(compaction.files):
        scratch = folder / str(number)
        scratch.mkdir()
        runs += open_runs(
            objects, file.path, interval=compaction.interval, scratch=scratch, batch_bytes=batch_bytes
        )
    return runs


def stretches(runs: Sequence[Run]) -> Iterator[pa.Table]:
    """Yield the updates of all sorted runs, cut by key: all updates of a key are in one piece, and keys rise between pieces.

    Within a piece the runs keep their order. One batch of each run is in memory at a time, and no key may be in two batches.
    """
    heads = [next(run, None) for run in runs]
    while True:
        for index, run in enumerate(runs):
            while (head := heads[index]) is not None and not head.num_rows:
                heads[index] = next(run, None)
        waiting = [head for head in heads if head is not None]
        if not waiting:
            return
        # The current batches hold all updates up to this key, and at least one batch ends with it.
        bound = min(_key(head, head.num_rows - 1) for head in waiting)
        counts = [
            0 if head is None else bisect_right(range(head.num_rows), bound, key=partial(_key, head))
            for head in heads
        ]
        # Also those without a row here: the first piece decides which columns the new file has.
        pieces = [head.slice(0, rows) for head, rows in zip(heads, counts, strict=True) if head is not None]
        yield join_updates(pieces)
        heads = [head and head.slice(rows) for head, rows in zip(heads, counts, strict=True)]


def _key(table: pa.Table, row: int) -> str:
    key: str = table.column("key")[row].as_py()
    return key


def compact_updates(updates: pa.Table, rules: CompactionRules, *, is_complete: bool) -> pa.Table:
    """Return one update per key, sorted, equivalent to all of its updates (in any order), without garbage."""
    combined = combine_updates(updates)
    if is_complete:
        # No older file has a state to which the addends would add.
        combined = with_whole_sums(combined)
    keys = combined.column("key").combine_chunks()
    slots = pc.index_in(updates.column("key").combine_chunks(), value_set=keys).to_numpy().astype(np.int64)
    columns = {name: combined.column(name) for name in combined.column_names}
    pending = updates.column("superstep").to_numpy() >= rules.pending_from
    columns["record_ids"] = _kept_lists(updates, "record_ids", slots, len(keys), rules.ids)
    for name in ("productions", *production_columns_among(updates.column_names)):
        columns[name] = _kept_lists(updates, name, slots, len(keys), pending)
    of_states = [combined.schema.field(name) for name in combined.column_names if is_typed_column(name)]
    of_productions = map(updates.schema.field, production_columns_among(updates.column_names))
    schema = pa.schema([*ROW_SCHEMA, *of_states, *of_productions])
    rows = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
    if not is_complete:
        return rows
    needed = lengths_of(rows.column("timers").combine_chunks()) > 0
    needed |= has_state(rows)
    for name in ("record_ids", "productions", "hold"):
        needed |= rows.column(name).is_valid().to_numpy()
    return rows if needed.all() else rows.filter(pa.array(needed))


def _kept_lists(
    updates: pa.Table, name: str, slots: _Index, count: int, kept_by: IdRetention | npt.NDArray[np.bool_]
) -> pa.ListArray:
    """Return per key the ids that ``kept_by`` keeps, or the productions of the updates that it selects.

    ``slots`` is the key of each update, below ``count``.
    """
    lists = updates.column(name).combine_chunks()
    values, parents = lists.flatten(), pc.list_parent_indices(lists).to_numpy()
    is_kept = kept_by.keeps(values) if isinstance(kept_by, IdRetention) else kept_by[parents]
    kept = np.flatnonzero(is_kept)
    if not len(kept):
        return nulls(lists.type, count)
    owners = slots[parents]
    kept = kept[np.argsort(owners[kept], kind="stable")]
    lengths = np.bincount(owners[kept], minlength=count)
    values = values.take(pa.array(kept))
    if isinstance(kept_by, IdRetention):
        values = kept_by.with_arrivals(values)
    return lists_of(values, lengths, lists.type, pa.array(lengths == 0))
