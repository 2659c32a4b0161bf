"""Loads: rows of a table become rows of a computation, in one fenced commit (MillWheel §7.1).

The load reads, checks and sorts the table before it takes a lease or writes a file. Then it takes the leases of the
computation's intervals as an owner does: one commit fences them, a second one adds all row files. Readers see either
none of the rows or all. A killed load leaves intervals without rows, and files that no commit names. A pipeline that
starts afterwards owns the rows as if its computation had written them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.failpoint import reach
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import exclusive
from millpond.statestore.loading.rows import Staging, staged_rows
from millpond.statestore.loading.source import LoadSource, pieces_of
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import RowFile, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, Fence
from millpond.statestore.rows.row_format import COMPACTED_PAGED_BYTES_MIN, ParquetRowFormat, RowFormat
from millpond.statestore.types import CommitNumber, Objects, Rng, Sequencer, Superstep, TableVersion

if TYPE_CHECKING:
    from millpond.statestore.history.lineage import Lineage
    from millpond.statestore.leases.lease import Lease, Leases
    from millpond.statestore.log.committer import Committer
    from millpond.statestore.rows.codec import Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBeginning:
    """Positions that the commit of a load records next to the rows, such as the start of each input.

    Attributes:
        positions: by application id.
        words: application ids of recorded words; their position is the load's version.
        source_offsets: the inputs' positions in their sources; see `CommitRequest`.
    """

    positions: Mapping[str, int] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    source_offsets: Mapping[str, str] = field(default_factory=dict)


LoadProgress: TypeAlias = Callable[[str, int, int | None], object]
"""Called with ``"read"`` or ``"write"``, the number of rows so far, and the total if it is known."""

_NO_SUPERSTEP: Final = Superstep(0)
_FILE_BYTES: Final = 1 << 26  # in memory; zstd makes about a quarter of it

_VERSION_END: Final = 1 << 31
_RESERVED: Final = frozenset({"dead_letters", "window_signals"})
# Loaded files are read by key until they are compacted, so even small ones get a page index.
_PARQUET: Final = ParquetRowFormat(COMPACTED_PAGED_BYTES_MIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The result of a load.

    Attributes:
        version: the table version that has the rows.
        computation: the computation.
        rows: number of rows.
        intervals: number of key intervals.
        files: number of row files.
        size_bytes: total size of the files.
    """

    version: TableVersion
    computation: str
    rows: int
    intervals: int
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedForm:
    """The encoding of a load's states; ``state_version`` applies to rows without a version."""

    codec: Codec
    state_version: int = 0


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The store that a load adds rows to.

    A load is a writer with its own leases, so a pipeline that runs on the same `Store` object holds its leases against
    the load. ``new_leases`` is ``None`` for a store that was opened read-only.
    """

    committer: Committer
    new_leases: Callable[[str, str], Leases] | None
    objects: Objects
    rng: Rng
    row_format: RowFormat
    lineage: Lineage
    path: str


def load_rows(
    target: LoadTarget,
    computation: str,
    source: LoadSource,
    form: LoadedForm,
    intervals: int | None,
    on_progress: LoadProgress,
    beginning: LoadBeginning | None = None,
) -> Loaded:
    """Add the rows of a table; `Store.load` explains the arguments and errors."""
    if target.new_leases is None:
        raise InvalidError("the store was opened read-only", path=target.path)
    if not isinstance(computation, str) or not computation or computation in _RESERVED:
        raise InvalidError(
            "computation must be a name that is not empty and not reserved", computation=computation
        )
    if intervals is not None and (type(intervals) is not int or intervals < 1):
        raise InvalidError("intervals must be a whole number of at least 1", intervals=intervals)
    if type(form.state_version) is not int or not 0 <= form.state_version < _VERSION_END:
        raise InvalidError(
            "state_version must be a whole number of at least 0", state_version=form.state_version
        )
    _refuse_rows(target.committer.refresh(), computation)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(_scratch_folder()))
        staging = opened.enter_context(closing(Staging(folder)))
        for piece in pieces_of(source):
            staging.add(staged_rows(piece, form.codec, before=staging.rows))
            on_progress("read", staging.rows, None)
        if not staging.rows and beginning is None:
            raise InvalidError("the table has no rows", computation=computation)
        staging.sort()
        # Only now: a table that cannot be loaded must not disturb a running pipeline.
        leases = opened.enter_context(
            closing(target.new_leases(target.lineage.current.id, target.rng.token()))
        )
        opened.enter_context(exclusive(leases))
        owned = _fence(target, leases, computation, intervals, staging)
        return _commit(target, computation, form, staging, owned, on_progress, beginning or LoadBeginning())


def _fence(
    target: LoadTarget, leases: Leases, computation: str, wanted: int | None, staging: Staging
) -> tuple[Lease, ...]:
    """Take and fence the computation's intervals: the existing ones, or as many as wanted."""
    snapshot = target.committer.refresh()
    known = tuple(snapshot.live_intervals(computation))
    taken = _take(
        leases, snapshot, known or intervals_from_boundaries(computation, staging.cuts(wanted or 1))
    )
    positions = target.lineage.unrecorded_location(target.path)
    if not known:
        positions |= {AppId.DECLARED_INTERVALS.of(computation, wanted or 0): snapshot.version + 1}
    writes = (
        IntervalWrite(interval=lease.interval, fence=Fence(lease.sequencer, CommitNumber(0)))
        for lease in taken
    )
    target.committer.commit(CommitRequest(kind="fence", writes=tuple(writes), positions=positions))
    reach("lease.fenced")
    # Again, behind the fence: a pipeline may have written rows since the first look, but can no longer.
    _refuse_rows(target.committer.refresh(), computation)
    return taken


def _commit(
    target: LoadTarget,
    computation: str,
    form: LoadedForm,
    staging: Staging,
    owned: Sequence[Lease],
    on_progress: LoadProgress,
    beginning: LoadBeginning,
) -> Loaded:
    is_parquet = isinstance(target.row_format, ParquetRowFormat)
    row_format = _PARQUET if is_parquet else target.row_format
    writing = _Writing(target.objects, target.rng, row_format, form.state_version)
    writes = tuple(writing.interval(staging, lease, on_progress) for lease in owned)
    # The files took a while: a lease that expired meanwhile ends the load here instead of at the fence.
    for lease in owned:
        lease.check()
    written_at = target.committer.refresh().version + 1
    words = (AppId.CODEC.of(computation, str(form.codec.name)), *beginning.words)
    positions = {**beginning.positions, **dict.fromkeys(words, written_at)}
    state_version = max(form.state_version, staging.state_version())
    if state_version:
        positions[AppId.STATE_VERSION.of(computation, state_version)] = written_at
    committed = target.committer.commit(
        CommitRequest(
            kind="load",
            writes=writes,
            positions=positions,
            metadata={"computation": computation, "rows": staging.rows},
            source_offsets=beginning.source_offsets,
        )
    )
    files = [file for one in writes for file in one.added]
    return Loaded(
        version=committed.version,
        computation=computation,
        rows=staging.rows,
        intervals=len(owned),
        files=len(files),
        size_bytes=sum(file.size_bytes for file in files),
    )


def _refuse_rows(snapshot: Snapshot, computation: str) -> None:
    if snapshot.files_in(computation):
        raise InvalidError(
            "cannot load into a computation that already has rows: use another name, or rewind the store to "
            "a version before its first row",
            computation=computation,
        )


def _take(leases: Leases, snapshot: Snapshot, intervals: Sequence[Interval]) -> tuple[Lease, ...]:
    fences = {interval: snapshot.fence_of(interval) for interval in intervals}
    above = {one: Sequencer(0) if fence is None else fence.sequencer for one, fence in fences.items()}
    try:
        taken = leases.take_all(above, on_held="refuse")
    except ConflictError as error:
        raise ConflictError(
            "a pipeline with this computation is running: stop it first",
            computation=intervals[0].computation,
            **{name: value for name, value in error.details.items() if name == "holder"},
        ) from error
    reach("lease.taken")
    return taken


class _Writing:
    """A writer of the row files of a load."""

    def __init__(self, objects: Objects, rng: Rng, row_format: RowFormat, state_version: int) -> None:
        self._state_version = state_version
        self._objects = objects
        self._rng = rng
        self._row_format = row_format
        self._rows = 0

    def interval(self, staging: Staging, lease: Lease, on_progress: LoadProgress) -> IntervalWrite:
        """Write the files of one interval; they stay invisible until they are committed."""
        fence = Fence(lease.sequencer, CommitNumber(1))
        files: list[RowFile] = []
        for table in _files_worth(staging.rows_of(lease.interval)):
            lease.check()
            files.append(
                write_row_file(
                    self._objects,
                    lease.interval,
                    _row_updates(table, fence, self._state_version),
                    superstep=_NO_SUPERSTEP,
                    fence=fence,
                    token=self._rng.token(),
                    row_format=self._row_format,
                )
            )
            self._rows += table.num_rows
            on_progress("write", self._rows, staging.rows)
        return IntervalWrite(interval=lease.interval, fence=fence, added=tuple(files))


def _files_worth(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Join batches until they make a file."""
    waiting: list[pa.Table] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += batch.nbytes
        if size >= _FILE_BYTES:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _row_updates(staged: pa.Table, fence: Fence, state_version: int) -> pa.Table:
    count = staged.num_rows
    columns = {
        "sequencer": _constant(fence.sequencer, count),
        "commit_number": _constant(fence.commit_number, count),
        "superstep": _constant(_NO_SUPERSTEP, count),
        "deleted": pa.array(np.zeros(count, np.bool_)),
    }
    versions = staged.column(STATE_VERSION)
    if state_version:
        versions = pc.fill_null(versions, pa.scalar(state_version, pa.int32()))
    has_state = pc.or_(*(staged.column(name).is_valid() for name in ("state", "state_bytes")))
    columns[STATE_VERSION] = pc.if_else(has_state, versions, pa.scalar(None, pa.int32()))
    for column in ROW_SCHEMA:
        if column.name in columns:
            continue
        if column.name in staged.column_names:
            columns[column.name] = staged.column(column.name).cast(column.type)
        else:
            columns[column.name] = pa.nulls(count, column.type)
    return pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)


def _constant(value: int, count: int) -> pa.Array:
    return pa.array(np.full(count, value, np.int64))


def _scratch_folder() -> TemporaryDirectory[str]:
    try:
        return TemporaryDirectory(prefix="millpond-load-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UnavailableError("cannot create a folder to sort rows in", cause=error) from error
