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
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import ConflictError, InvalidError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import Lease, Leases, exclusive, unrecorded_ensemble
from millpond.statestore.loading.rows import Staging, staged_rows
from millpond.statestore.loading.source import LoadSource, pieces_of
from millpond.statestore.log.committer import Committer
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.codec import Codec
from millpond.statestore.rows.files import RowFile, scratch_folder, write_row_file
from millpond.statestore.rows.row import ROW_SCHEMA, STATE_VERSION, Fence
from millpond.statestore.rows.row_format import COMPACTED_PAGED_BYTES_MIN, ParquetRowFormat, RowFormat
from millpond.statestore.types import CommitNumber, Objects, Rng, Sequencer, Superstep, TableVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBeginning:
    """Positions that the commit of a load records next to the rows, such as the start of each input."""

    positions: Mapping[str, int] = field(default_factory=dict)  # by application id
    words: tuple[str, ...] = ()  # application ids of recorded words; their position is the load's version
    source_offsets: Mapping[str, str] = field(default_factory=dict)  # see `CommitRequest`


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
    """The result of a load: numbers of rows, key intervals and row files, and the files' size."""

    version: TableVersion  # that has the rows
    computation: str
    rows: int
    intervals: int
    files: int
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class Load:
    """One load, a writer with its own leases: a pipeline on the same `Store` object keeps its leases from the load."""

    committer: Committer
    leases: Callable[[str, str], Leases] | None  # none for a store that was opened read-only
    objects: Objects
    rng: Rng
    row_format: RowFormat
    lineage: Lineage
    path: str
    computation: str
    codec: Codec
    state_version: int  # of rows without a version
    intervals: int | None
    on_progress: LoadProgress
    beginning: LoadBeginning | None
    _written: int = 0

    def run(self, source: LoadSource) -> Loaded:
        """Add the rows of a table; `Store.load` explains the arguments and errors."""
        self._check_arguments()
        self._refuse_rows(self.committer.refresh())
        with ExitStack() as opened:
            folder = opened.enter_context(scratch_folder("sort rows in"))
            staging = opened.enter_context(closing(Staging(folder)))
            for piece in pieces_of(source):
                staging.add(staged_rows(piece, self.codec, before=staging.rows))
                self.on_progress("read", staging.rows, None)
            if not staging.rows and self.beginning is None:
                raise InvalidError("the table has no rows", computation=self.computation)
            staging.sort()
            # Only now: a table that cannot be loaded must not disturb a running pipeline.
            if self.leases is None:
                raise InvalidError("the store was opened read-only", path=self.path)
            leases = self.leases(self.lineage.current.id, self.rng.token())
            opened.enter_context(closing(leases))
            opened.enter_context(exclusive(leases))
            return self._commit(staging, self._fence(leases, staging))

    def _check_arguments(self) -> None:
        name, count, version = self.computation, self.intervals, self.state_version
        if not isinstance(name, str) or not name or name in _RESERVED:
            raise InvalidError(
                "computation must be a name that is not empty and not reserved", computation=name
            )
        if count is not None and (type(count) is not int or count < 1):
            raise InvalidError("intervals must be a whole number of at least 1", intervals=count)
        if type(version) is not int or not 0 <= version < _VERSION_END:
            raise InvalidError("state_version must be a whole number of at least 0", state_version=version)

    def _refuse_rows(self, snapshot: Snapshot) -> None:
        if snapshot.files_in(self.computation):
            raise InvalidError(
                "cannot load into a computation that already has rows: use another name, or rewind the store to "
                "a version before its first row",
                computation=self.computation,
            )

    def _fence(self, leases: Leases, staging: Staging) -> tuple[Lease, ...]:
        """Take and fence the computation's intervals: the existing ones, or as many as wanted."""
        snapshot = self.committer.refresh()
        known, wanted = tuple(snapshot.live_intervals(self.computation)), self.intervals
        cuts = () if known else staging.cuts(wanted or 1)
        taken = self._take(leases, snapshot, known or intervals_from_boundaries(self.computation, cuts))
        positions = self.lineage.unrecorded_location(self.path)
        positions |= unrecorded_ensemble(leases, snapshot.txns, snapshot.version + 1)
        if not known:
            positions |= {AppId.DECLARED_INTERVALS.of(self.computation, wanted or 0): snapshot.version + 1}
        writes = tuple(
            IntervalWrite(interval=lease.interval, fence=Fence(lease.sequencer, CommitNumber(0)))
            for lease in taken
        )
        self.committer.commit(CommitRequest(kind="fence", writes=writes, positions=positions))
        reach("lease.fenced")
        # Again, behind the fence: a pipeline may have written rows since the first look, but can no longer.
        self._refuse_rows(self.committer.refresh())
        return taken

    def _take(self, leases: Leases, snapshot: Snapshot, intervals: Sequence[Interval]) -> tuple[Lease, ...]:
        fences = {interval: snapshot.fence_of(interval) for interval in intervals}
        above = {one: Sequencer(0) if fence is None else fence.sequencer for one, fence in fences.items()}
        try:
            taken = leases.take_all(above, on_held="refuse")
        except ConflictError as error:
            raise ConflictError(
                "a pipeline with this computation is running: stop it first",
                computation=self.computation,
                **{name: value for name, value in error.details.items() if name == "holder"},
            ) from error
        reach("lease.taken")
        return taken

    def _commit(self, staging: Staging, owned: Sequence[Lease]) -> Loaded:
        computation, beginning = self.computation, self.beginning or LoadBeginning()
        writes = tuple(self._write(staging, lease) for lease in owned)
        # The files took a while: a lease that expired meanwhile ends the load here instead of at the fence.
        for lease in owned:
            lease.check()
        written_at = self.committer.refresh().version + 1
        words = (AppId.CODEC.of(computation, str(self.codec.name)), *beginning.words)
        positions = {**beginning.positions, **dict.fromkeys(words, written_at)}
        state_version = max(self.state_version, staging.state_version())
        if state_version:
            positions[AppId.STATE_VERSION.of(computation, state_version)] = written_at
        committed = self.committer.commit(
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

    def _write(self, staging: Staging, lease: Lease) -> IntervalWrite:
        fence = Fence(lease.sequencer, CommitNumber(1))
        files: list[RowFile] = []
        for table in _files_worth(staging.rows_of(lease.interval)):
            lease.check()
            file = write_row_file(
                self.objects,
                lease.interval,
                _row_updates(table, fence, self.state_version),
                superstep=_NO_SUPERSTEP,
                fence=fence,
                token=self.rng.token(),
                row_format=_PARQUET if isinstance(self.row_format, ParquetRowFormat) else self.row_format,
            )
            files.append(file)
            self._written += table.num_rows
            self.on_progress("write", self._written, staging.rows)
        return IntervalWrite(interval=lease.interval, fence=fence, added=tuple(files))


def _files_worth(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
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
    numbers = {"sequencer": fence.sequencer, "commit_number": fence.commit_number, "superstep": _NO_SUPERSTEP}
    columns = {name: pa.array(np.full(count, number, np.int64)) for name, number in numbers.items()}
    columns["deleted"] = pa.array(np.zeros(count, np.bool_))
    versions = staged.column(STATE_VERSION)
    if state_version:
        versions = pc.fill_null(versions, pa.scalar(state_version, pa.int32()))
    has_state = pc.or_(*(staged.column(name).is_valid() for name in ("state", "state_bytes")))
    columns[STATE_VERSION] = pc.if_else(has_state, versions, pa.scalar(None, pa.int32()))
    for name, kind in zip(ROW_SCHEMA.names, ROW_SCHEMA.types, strict=True):
        if name not in columns:
            is_staged = name in staged.column_names
            columns[name] = staged.column(name).cast(kind) if is_staged else pa.nulls(count, kind)
    return pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)
