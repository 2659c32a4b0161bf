"""The initial scan: what a new owner must know about the rows before it works.

It finds the pending timers and the holds of each interval in the committed files (MillWheel
§6.2, §7.1). The rows stay in their files; a worker's soft state reads them when it needs them.

What the table records of how states were written: their codec, version and parts, and whether today's code reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.timers import oldest_but
from millpond.executor.inputs.positions import stored_state_version
from millpond.executor.interval.row_cache import clock_names
from millpond.executor.ownership.evolution import Evolution, check_codecs, codec_records, name_records
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import EXACT, PercentileTimes
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.files import LiveFile
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import LARGE_BYTES, read_row_files
from millpond.statestore.rows.merge import MERGE_COLUMNS, combine_updates
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.types import EventTimeMicros, Objects, WallTimeMicros
from millpond.statestore.view_columns import fits, state_columns_in, state_word

_STATE_COLUMNS = ("state", "state_bytes", "state_version")
_SCAN_COLUMNS = tuple(name for name in MERGE_COLUMNS if name not in _STATE_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalSummary:
    """What the driver keeps about an interval between supersteps.

    Attributes:
        next_event_timer: earliest pending timer in event time.
        next_wall_timer: earliest pending timer in wall time.
        hold: oldest output timestamp that a row still owes.
        next_percentile_timers: earliest pending timer for each percentile watermark.
        percentile_holds: oldest output timestamps when a share of the rows is left out, by percentile.
    """

    next_event_timer: EventTimeMicros | None = None
    next_wall_timer: WallTimeMicros | None = None
    hold: EventTimeMicros | None = None
    next_percentile_timers: PercentileTimes = field(default_factory=dict)
    percentile_holds: PercentileTimes = field(default_factory=dict)

    def is_due(self, now: WallTimeMicros, mark: Callable[[float], EventTimeMicros]) -> bool:
        """Whether a pending timer fires now.

        Args:
            now: the wall time.
            mark: the computation's input watermark at a percentile.
        """
        if self.next_wall_timer is not None and self.next_wall_timer <= now:
            return True
        if self.next_event_timer is not None and self.next_event_timer <= mark(EXACT):
            return True
        return any(at <= mark(percentile) for percentile, at in self.next_percentile_timers.items())


def scan_interval(
    objects: Objects, interval: Interval, files: Sequence[LiveFile], percentiles: Collection[float] = ()
) -> IntervalSummary:
    """Read the timers and holds of an interval from its files.

    Args:
        objects: where the files are.
        interval: the interval.
        files: all its live files.
        percentiles: the percentile watermarks that the pipeline keeps.

    Raises:
        DataError: a file is missing or its bytes are wrong.
    """
    if not files:
        return IntervalSummary()
    # State is the bulk of a row and does not affect timers or holds, so it is not read.
    updates = read_row_files(
        objects,
        [file.path for file in files],
        columns=list(_SCAN_COLUMNS),
        interval=interval,
        large={file.path for file in files if file.size_bytes >= LARGE_BYTES},
    )
    for name in _STATE_COLUMNS:
        updates = updates.append_column(name, pa.nulls(updates.num_rows, ROW_SCHEMA.field(name).type))
    rows = combine_updates(updates)
    timers = rows.column("timers").combine_chunks()
    flat = pc.list_flatten(timers)
    holds = rows.column("hold").cast(pa.int64()).drop_null().to_numpy()
    clocks = clock_names(flat.field("domain"))
    timers_by_percentile = {
        percentile: _earliest(flat, names) for percentile, names in clocks.percentiles.items()
    }
    event = _earliest(flat, clocks.event)
    wall = _earliest(flat, clocks.wall)
    return IntervalSummary(
        next_event_timer=None if event is None else EventTimeMicros(event),
        next_wall_timer=None if wall is None else WallTimeMicros(wall),
        hold=EventTimeMicros(int(holds.min())) if len(holds) else None,
        next_percentile_timers={
            percentile: EventTimeMicros(at)
            for percentile, at in timers_by_percentile.items()
            if at is not None
        },
        percentile_holds=oldest_but(holds, percentiles) if len(holds) else {},
    )


def _earliest(timers: pa.StructArray, names: Sequence[str]) -> int | None:
    if not names:
        return None
    chosen = timers.filter(pc.is_in(timers.field("domain"), pa.array(names, pa.string())))
    earliest = pc.min(chosen.field("at").cast(pa.int64())).as_py()
    return None if earliest is None else int(earliest)


_DEFAULT: Final = Computation.upgrade_state


def check_states(topology: Topology, snapshot: Snapshot, evolution: Evolution, objects: Objects) -> None:
    """Refuse to run code that cannot read the stored states of its computations.

    Raises:
        InvalidError: states were written by newer code, by earlier code without an ``upgrade_state`` now, with
            another codec, or with a part of another type; the error names the computation and the ways out.
        DataError: a file is missing or its bytes are wrong.
    """
    former = {new: old for old, new in evolution.renames.items()}
    for node in topology.computations.values():
        name = former.get(node.name, node.name)
        if not snapshot.files_in(name):
            continue
        stored, declared = stored_state_version(snapshot.txns, name), node.computation.state_version
        if stored > declared:
            raise InvalidError(
                "newer code has written the computation's states: run that code, or take the store back to a version "
                "before it (`millpond rewind`), or go on from such a version elsewhere (`millpond fork`)",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored < declared and type(node.computation).upgrade_state is _DEFAULT:
            raise InvalidError(
                "the computation's states are of an earlier state_version, and its code has no upgrade_state: give it "
                "one, which returns the state in its new form",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored == declared:
            _check_columns(node, snapshot, name)
    check_codecs(topology, snapshot, evolution, objects)


def state_records(topology: Topology, snapshot: Snapshot, names: frozenset[str]) -> dict[str, int]:
    """The positions that record codecs, state versions, the parts of states and the pipeline's name, except those that the table has.

    Raises:
        InvalidError: another process has renamed the pipeline meanwhile.
    """
    records = codec_records(topology, snapshot, names) | name_records(topology, snapshot)
    for name in sorted(names & topology.computations.keys()):
        version = topology.computations[name].computation.state_version
        if stored_state_version(snapshot.txns, name) != version:
            records[AppId.STATE_VERSION.of(name, version)] = snapshot.version + 1
        columns = topology.computations[name].computation.state_columns
        if state_columns_in(snapshot.txns, name) != columns:
            records[AppId.STATE_COLUMNS.of(name, state_word(columns))] = snapshot.version + 1
    return records


def _check_columns(node: ComputationNode, snapshot: Snapshot, name: str) -> None:
    declared = {column.name: column for column in node.computation.state_columns}
    for column in state_columns_in(snapshot.txns, name):
        now = declared.get(column.name)
        if now is not None and not fits(column, now):
            raise InvalidError(
                "the computation has stored a state variable with another schema: fields may come and go and numbers "
                "become wider, and for anything else the variable needs another name",
                computation=node.name,
                state=column.name,
                stored=state_word([column]),
                declared=state_word([now]),
            )
