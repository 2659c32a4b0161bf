"""Differences between two stores: keys, states, timers and sink rows, for example of a replay and its original."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.executor.replay.replay import ReplayNote, read_note
from millpond.executor.sinks.columns import SinkRecord
from millpond.executor.sinks.delta_table import read_rows, version_within
from millpond.executor.sinks.fork import SinkFolder
from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import Lineage
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Superstep
from millpond.statestore.view import RowsView, confined, fresh_duckdb

if TYPE_CHECKING:
    import duckdb

_ROW_NAMES: Final = ("computation", "key", "kind", "parts", "state", "other_state", "timers", "other_timers")
_ROWS: Final = pa.schema([(name, pa.string()) for name in _ROW_NAMES])
_SINK_ROWS: Final = pa.schema([(name, pa.string()) for name in ("sink", "kind", "row")])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """Counts of equal and different rows of one computation or sink.

    Attributes:
        changed: keys in both stores with another state or other timers; 0 for sinks, whose rows have no key.
        added: rows that only the first store has.
        missing: rows that only the second store has.
    """

    name: str
    equal: int
    changed: int
    added: int
    missing: int

    @property
    def is_empty(self) -> bool:
        """True if there is no difference."""
        return not (self.changed or self.added or self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDifference:
    """The difference between two stores at ``version`` and ``other_version``.

    Attributes:
        sinks: counts by sink; empty if the sinks' tables cannot be matched.
        rows: the different rows: ``computation``, ``key``, ``kind`` (``changed``, ``added``, ``missing``), ``parts``
            that differ, ``state`` and ``other_state``, ``timers`` and ``other_timers`` as text.
        sink_rows: the different rows of sinks: ``sink``, ``kind`` (``added``, ``missing``), ``row`` as JSON.
    """

    version: int
    other_version: int
    computations: tuple[PartDifference, ...]
    sinks: tuple[PartDifference, ...]
    rows: pa.Table
    sink_rows: pa.Table

    @property
    def is_empty(self) -> bool:
        """True if nothing differs."""
        return all(part.is_empty for part in (*self.computations, *self.sinks))

    def to_duckdb(self, *, allow_files: bool = False) -> duckdb.DuckDBPyConnection:
        """Open an in-memory database with the tables ``rows`` and ``sink_rows``.

        Queries reach nothing else, unless ``allow_files``; see `Store.sql`.
        """
        connection = fresh_duckdb()
        connection.register("rows", self.rows)
        connection.register("sink_rows", self.sink_rows)
        return connection if allow_files else confined(connection)


def compare_stores(
    store: Store,
    other: Store,
    *,
    version: int | None = None,
    other_version: int | None = None,
    computations: Collection[str] | None = None,
) -> StoreDifference:
    """Compare the rows of two stores, and the sinks of a replay with its original's sinks.

    Dead letters are compared by content, not by their keys, which number them. The rows of one computation, of both
    stores, are in memory at once. The first store may be a replay of the second, its original; then ``other_version``
    is by default the version that the replay ended with. Versions are the newest by default, computations all of
    either store.

    Raises:
        InvalidError: there is no such version or computation, or the replay is incomplete.
        ConflictError: a version has been collected.
        DataError: bytes of a store are missing or wrong.

    Example::

        difference = mp.compare_stores(replay, original)
        assert difference.is_empty, difference.rows
    """
    note = None
    if not store.path.startswith("memory:"):
        note = read_note(open_objects(store.path, store.storage_options))
    if note is not None and note.store != other.path:
        note = None
    if other_version is None and note is not None:
        other_version = note.until
    with store.reading(version) as first, other.reading(other_version) as second:
        if note is not None and version is None:
            _check_complete(note, first)
        names = sorted({*first.computations, *second.computations})
        unknown = sorted(set(computations or ()) - set(names))
        if unknown:
            raise InvalidError("no store has such a computation", computation=unknown[0], known=names)
        compared = [
            _compare(RowsView.of(first, store.objects, name), RowsView.of(second, other.objects, name))
            for name in names
            if computations is None or name in computations
        ]
        sinks = [] if note is None or computations is not None else [*_sinks(store, other, second, note)]
    return StoreDifference(
        version=first.version,
        other_version=second.version,
        computations=tuple(part for part, _ in compared),
        sinks=tuple(part for part, _ in sinks),
        rows=_joined((rows for _, rows in compared), _ROWS),
        sink_rows=_joined((rows for _, rows in sinks), _SINK_ROWS),
    )


def _check_complete(note: ReplayNote, snapshot: Snapshot) -> None:
    reached = snapshot.txns.get(AppId.SUPERSTEP.of(note.pipeline), 0)
    if note.recorded and reached < note.superstep:
        raise InvalidError(
            "the replay is incomplete: call it again with the same arguments",
            superstep=reached,
            last=note.superstep,
        )


def _joined(tables: Iterable[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in tables)])


_SIDE: Final = """
    select key, coalesce(state, hex(state_bytes)) as state, to_json(timers)::varchar as timers, hold, state_bytes
    from {side}
"""

_LETTERS: Final = """
    select content || '#' || row_number() over (partition by content) as key, content as state,
        null::varchar as timers, null as hold, null::blob as state_bytes
    from (select json_merge_patch(state, '{{"failed_at": null}}')::varchar as content from {side})
"""

_COMPARED: Final = """
    create temp table compared as
    select * exclude (is_here, is_there, differing),
        case when not is_there then 'added' when not is_here then 'missing'
            when len(differing) > 0 then 'changed' else 'equal' end as kind,
        case when is_here and is_there then array_to_string(differing, ', ') else '' end as parts
    from (
        select
            coalesce(here.key, there.key) as key, here.key is not null as is_here, there.key is not null as is_there,
            here.state as state, there.state as other_state,
            here.timers as timers, there.timers as other_timers,
            list_filter([
                case when here.state is distinct from there.state
                    or here.state_bytes is distinct from there.state_bytes then 'state' end,
                case when here.timers is distinct from there.timers then 'timers' end,
                case when here.hold is distinct from there.hold then 'hold' end
            ], lambda part: part is not null) as differing
        from ({here}) as here full outer join ({there}) as there using (key)
    )
"""


def _compare(view: RowsView, other: RowsView) -> tuple[PartDifference, pa.Table]:
    connection = fresh_duckdb()
    connection.register("here_rows", view.to_arrow())
    connection.register("there_rows", other.to_arrow())
    is_letters = view.computation == DEAD_LETTERS
    side = _LETTERS if is_letters else _SIDE
    here, there = side.format(side="here_rows"), side.format(side="there_rows")
    connection.execute(_COMPARED.format(here=here, there=there))
    counts = connection.execute("select kind, count(*) from compared group by kind").fetchall()
    key = "state ->> 'key'" if is_letters else "key"
    other_key = "other_state ->> 'key'" if is_letters else "key"
    rows = connection.sql(
        f"select ? as computation, coalesce({key}, {other_key}) as key, kind, parts, state, other_state, timers, "  # noqa: S608 - its own words
        "other_timers from compared where kind <> 'equal' order by kind, compared.key",
        params=[view.computation],
    ).to_arrow_table()
    return _part(view.computation, dict(counts)), rows


def _part(name: str, counts: Mapping[str, int]) -> PartDifference:
    kinds = ("equal", "changed", "added", "missing")
    return PartDifference(name=name, **{kind: int(counts.get(kind) or 0) for kind in kinds})


_SINK_COMPARED: Final = """
    create temp table sides as
    with here_sums as (select to_json(row)::varchar as row, count(*) as times from here_rows as row group by all),
        there_sums as (select to_json(row)::varchar as row, count(*) as times from there_rows as row group by all)
    select row, coalesce(here_sums.times, 0) as here, coalesce(there_sums.times, 0) as there
    from here_sums full outer join there_sums using (row)
"""

_SINK_COUNTS: Final = """
    select sum(least(here, there)) as equal, sum(greatest(here - there, 0)) as added,
        sum(greatest(there - here, 0)) as missing
    from sides
"""

_SINK_DIFFERENCE: Final = """
    select ? as sink, case when here > there then 'added' else 'missing' end as kind, row
    from sides, range(abs(here - there)) where here <> there order by kind, row
"""


def _sinks(
    store: Store, other: Store, second: Snapshot, note: ReplayNote
) -> Iterator[tuple[PartDifference, pa.Table]]:
    folder = SinkFolder(
        store=store.path, storage_options=store.storage_options, clock=SystemClock(), rng=SystemRng()
    )
    lineage = Lineage.of(other.lineage.store_id, second.txns)
    for name, path in sorted(note.sinks.items()):
        ours = Log(open_objects(folder.place_of(name), dict(store.storage_options) or None))
        theirs = Log(open_objects(path, dict(other.storage_options) or None))
        newest, reached = ours.latest_version(), theirs.latest_version()
        here = pa.table({}) if newest is None else read_rows(ours.objects, newest)
        there = pa.table({})
        if reached is not None:
            limits = SinkRecord(lineage, note.pipeline, name).limits(
                load(theirs).txns, Superstep(note.superstep)
            )
            version = version_within(theirs, limits)
            there = there if version is None else read_rows(theirs.objects, version)
        yield _compare_sink(name, here, there)


def _compare_sink(name: str, here: pa.Table, there: pa.Table) -> tuple[PartDifference, pa.Table]:
    connection = fresh_duckdb()
    columns = sorted({*here.column_names, *there.column_names})
    if not columns:
        return _part(name, {}), _SINK_ROWS.empty_table()
    connection.register("here_rows", _with_columns(here, there, columns))
    connection.register("there_rows", _with_columns(there, here, columns))
    connection.execute(_SINK_COMPARED)
    [counts] = connection.sql(_SINK_COUNTS).to_arrow_table().to_pylist()
    rows = connection.sql(_SINK_DIFFERENCE, params=[name]).to_arrow_table()
    return _part(name, counts), rows


def _with_columns(table: pa.Table, other: pa.Table, columns: Iterable[str]) -> pa.Table:
    """Add the other table's columns, so that rows of both have the same JSON."""
    arrays = {
        name: table.column(name)
        if name in table.column_names
        else pa.nulls(table.num_rows, other.schema.field(name).type)
        for name in columns
    }
    return pa.table(arrays)
