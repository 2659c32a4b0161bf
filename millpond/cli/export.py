"""``millpond export``: the rows of a store as tables that other programs read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import click
import duckdb
import pyarrow as pa
from deltalake import write_deltalake

from millpond.cli.completion import complete_computation
from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.opening import StoreAt, check_computation, store_argument, version_option
from millpond.cli.terminal.options import flag, json_option, option
from millpond.cli.terminal.output import print_json, progress_bar, say
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.objects.obstore import file_here, place_for_delta_rs
from millpond.statestore.rows.value_text import TYPED_MARK
from millpond.statestore.store import Store
from millpond.statestore.view import RowsView, fresh_duckdb

# The columns that `millpond load` takes.
_LOADED: Final = ("key", "state", "state_bytes", "state_version", "timers")
# The columns that DuckDB selects, and the options it writes with, by the format.
# JSON drops the mark of a text with types, so other states that look like one are wrapped; and null means no state.
_STATE_AS_JSON: Final = f"""
case
    when not json_valid(state) then to_json(state)
    when state = 'null' or (not starts_with(state, '{TYPED_MARK}') and json_exists(state, '$."$types"'))
        then json_object('$value', state::json, '$types', '{{}}'::json)
    else state::json
end as state"""
_BYTES: Final = "to_base64(state_bytes) as state_bytes"
_COPY: Final = {
    "parquet": ("*", "format parquet"),
    "jsonl": (f"* replace ({_STATE_AS_JSON}, {_BYTES})", "format json"),
    "csv": (f"* replace (to_json(timers) as timers, {_BYTES})", "format csv, header"),
}
_DELTA: Final = "delta"


@command(
    "millpond export pond tables",
    "millpond export pond tables window_counter --format csv",
    "millpond export pond as_of_12 --version 12 --format delta",
    "millpond export pond moved --for-load --json | jq .path",
)
@store_argument
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("computations", nargs=-1, shell_complete=complete_computation)
@option(
    "--format format_", "Files of this format, or Delta tables.", choices=[*_COPY, _DELTA], default="parquet"
)
@flag("--for-load", "Only the columns that `millpond load` takes.")
@version_option
@json_option("One JSON object per table.")
def export(
    store: StoreAt,
    folder: Path,
    computations: tuple[str, ...],
    format_: str,
    version: str | None,
    *,
    for_load: bool,
    as_json: bool,
) -> None:
    """Write a table of the rows of each of COMPUTATIONS of STORE into FOLDER; of all, unless some are named.

    A table has a row for each key with state or timers: the key, the values that typed keys are made of, the state as
    the computation's codec wrote it, the timers, the hold and the superstep that last changed the row. All tables are of
    one version of the store, which may run meanwhile. They are files named after their computations
    (FOLDER/window_counter.parquet), or Delta tables of these names. In CSV, timers are JSON text; in CSV and JSON,
    bytes of states are base64.

    A table appears as a whole, and none is overwritten: choose a new FOLDER, or remove the old tables.
    """
    written, folder = [], file_here(folder)
    with store.reading(version) as (opened, snapshot):
        suffix = "" if format_ == _DELTA else f".{format_}"
        targets = [(name, folder / f"{name}{suffix}") for name in computations or snapshot.computations]
        for name, target in targets:
            check_computation(snapshot, name)
            if target.parent != folder:
                raise InvalidError("the computation's name is no name of a file", computation=name)
            if format_ == _DELTA:
                place_for_delta_rs(target, writes=True)
            if target.exists():
                raise InvalidError(
                    "there is a table already: choose another folder, or remove it", path=target
                )
        with progress_bar("writing tables") as on_progress:
            for number, (name, target) in enumerate(targets):
                on_progress(number, len(targets))
                rows = _Rows(opened, snapshot, name, for_load=for_load)
                _write(rows, target, _COPY.get(format_))
                made = {"path": str(target), "rows": rows.count, "version": snapshot.version}
                written.append({"computation": name, **made})
    if as_json:
        print_json(written)
        return
    for table in written:
        say(f"{table['path']}: {table['rows']:,} rows of {table['computation']}")


def _write(rows: _Rows, target: Path, copied: tuple[str, str] | None) -> None:
    # Under another name first, so that a killed export leaves no half of a table.
    staged = target.with_name(f".{target.name}.writing")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if staged.is_dir():
            shutil.rmtree(staged)
        staged.unlink(missing_ok=True)
        if copied is not None:
            selected, how = copied
            with closing(fresh_duckdb()) as connection:
                connection.register("written", rows.reader())
                # DuckDB has its own rule for a ~ at the beginning.
                place = str(staged.absolute()).replace("'", "''")
                connection.execute(f"copy (select {selected} from written) to '{place}' ({how})")  # noqa: S608
        else:
            write_deltalake(str(staged), rows.reader())
        staged.rename(target)
    except (OSError, duckdb.Error) as error:
        raise UnavailableError("the table could not be written", path=target, reason=str(error)) from error


class _Rows:
    """The rows of a computation, read interval by interval, so that memory does not grow with their number."""

    def __init__(self, store: Store, snapshot: Snapshot, computation: str, *, for_load: bool) -> None:
        self._whole = RowsView.of(snapshot, store.objects, computation)
        self._snapshot = snapshot
        self._for_load = for_load
        self.count = 0

    def reader(self) -> pa.RecordBatchReader:
        """Return the rows in key order; `count` is the number read so far."""
        schema = self._shown(replace(self._whole, files=()).to_arrow()).schema
        return pa.RecordBatchReader.from_batches(schema, self._batches(schema))

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        intervals = self._snapshot.live_intervals(self._whole.computation)
        for interval in sorted(intervals, key=lambda one: one.low):
            part = replace(self._whole, files=self._snapshot.files_of(interval))
            rows = self._shown(part.to_arrow()).cast(schema)
            self.count += rows.num_rows
            yield from rows.to_batches()

    def _shown(self, rows: pa.Table) -> pa.Table:
        if not self._for_load:
            return rows
        return rows.select([name for name in _LOADED if name in rows.column_names])
