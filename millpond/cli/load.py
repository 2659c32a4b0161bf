"""``millpond load`` and ``import-checkpoint``: rows out of a file, or out of the state of a stopped Spark query."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from millpond.cli.completion import complete_store
from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.inputs import load_function, workers_import_from_here
from millpond.cli.terminal.opening import (
    StoreAt,
    read_options,
    storage_option,
    store_argument,
    zookeeper_options,
)
from millpond.cli.terminal.options import flag, json_option, number, option
from millpond.cli.terminal.output import note, print_json, print_table, say, size_text, stages_bar, time_text
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.objects.hadoop import scheme_of
from millpond.statestore.rows.codec import BytesCodec, Codec, JsonCodec, MsgpackCodec
from millpond.statestore.rows.key_text import decode_key

if TYPE_CHECKING:
    from millpond.executor.spark_compat.import_checkpoint import ImportedCheckpoint

_CODECS: Final[dict[str, Codec]] = {"json": JsonCodec(), "msgpack": MsgpackCodec(), "bytes": BytesCodec()}
_TIMEOUTS: Final = {"event": "EventTimeTimeout", "processing": "ProcessingTimeTimeout"}
_NOT_RUN: Final = "the checkpoint of a Spark query"
_MICROS: Final = 1_000


@command(
    "millpond load pond counts counts.parquet",
    "millpond load pond visits counts.jsonl --intervals 8",
    "millpond load new_pond counts counts.csv --create --json | jq .rows",
)
@store_argument
@click.argument("computation")
@click.argument("file", type=click.Path())
@number("--intervals", "Into how many key intervals its keys are cut, if the computation has none yet.")
@option("--codec codec_name", "The computation's codec.", choices=sorted(_CODECS), default="json")
@number("--state-version", "The state_version of the code whose states these are.", 0, least=0)
@flag("--create", "Create the store if there is none.")
@zookeeper_options
@json_option("Print the result as a JSON object.")
def load(
    store: StoreAt,
    computation: str,
    file: str,
    intervals: int | None,
    codec_name: str,
    state_version: int,
    *,
    create: bool,
    as_json: bool,
) -> None:
    """Make rows of COMPUTATION of FILE (Parquet, CSV or JSON), in one commit: the state and timers that it begins with.

    The file has a column `key`, and `state`, `timers` or both. In CSV and JSON a state is JSON; in Parquet it is a
    value, or JSON text. Timers are lists of objects with `at` (microseconds since 1970 UTC, or a time with a zone),
    and where needed `tag`, `domain` (`event` or `wall`) and `output_at`; in CSV they are JSON too. CSV has commas and
    double quotes. Bytes of a state (`state_bytes`) are base64 in CSV and JSON.

    The computation must have no rows, and no pipeline that has it may be running. If the command is killed, the store
    has all of the rows or none, and you can run it again.
    """
    with store.to_write(create=create) as opened, stages_bar("rows", ("read", "write")) as on_progress:
        loaded = opened.load(
            computation,
            file,
            codec=_CODECS[codec_name],
            state_version=state_version,
            intervals=intervals,
            told=on_progress,
        )
    if as_json:
        print_json([asdict(loaded)])
        return
    say(
        f"version {loaded.version} has {loaded.rows:,} rows of {computation}: "
        f"{loaded.intervals} intervals, {loaded.files} files, {size_text(loaded.size_bytes)}"
    )


@command(
    Example(
        "millpond import-checkpoint checkpoints/totals --computation RunningTotal --into pond --dry-run",
        not_run=_NOT_RUN,
    ),
    Example(
        "millpond import-checkpoint checkpoints/totals --computation RunningTotal --into pond",
        not_run=_NOT_RUN,
    ),
    Example(
        "millpond import-checkpoint checkpoints/sessions --operator 1 --computation sessions --timeout event"
        " --into pond --json",
        not_run=_NOT_RUN,
    ),
    Example(
        "millpond import-checkpoint checkpoints/sums --computation sums --convert sums:state --into pond",
        not_run=_NOT_RUN,
    ),
)
@click.argument("checkpoint")
@number("--operator", "Spark's number of the stateful operator, if the query has several.", least=0)
@option("--computation=C", "The computation that takes the state over.", required=True)
@option("--into=STORE", "The store.", required=True, shell_complete=complete_store)
@option("--pipeline=NAME", "The computation's pipeline, if that has another name than C.")
@option("--input=STREAM stream", "The injected stream that resumes the query's sources.", default="input")
@flag("--no-sources", "Leave the query's sources alone: move the state only.")
@flag("--plain-key", 'The pipeline\'s key is a column of text (key="card"), not a list of columns.')
@option("--timeout", "Of applyInPandasWithState: of which time its timeouts are.", choices=sorted(_TIMEOUTS))
@option(
    "--event-time=COLUMN",
    "Of dropDuplicates: the key's column that the watermark is on, so that keys expire.",
)
@option(
    "--convert=MODULE:FUNCTION convert_name",
    "Of an aggregation: makes the state of the key's columns and the buffers, two mappings.",
)
@number("--intervals", "Into how many key intervals the keys are cut.")
@flag("--dry-run", "Count, and show some rows; write nothing.")
@storage_option
@zookeeper_options
@json_option("Print the result as a JSON object.")
def import_checkpoint(
    checkpoint: str,
    into: str,
    stream: str,
    timeout: str | None,
    convert_name: str | None,
    storage_options: tuple[str, ...],
    zookeeper: str | None,
    zookeeper_security: ZooKeeperSecurity | None,
    *,
    no_sources: bool,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Make rows of a store of the state in CHECKPOINT, the checkpoint of a stopped Spark query.

    The query is one with transformWithState, applyInPandasWithState, dropDuplicates or an aggregation. Its state
    variables, timers and watermark move, in one commit, and so does the place in its sources: run the same frame on the
    store afterwards, and it continues behind the last batch that the query has done. CHECKPOINT is only read.

    The store is created if there is none. The computation must have no rows, and no pipeline that has it may be running.
    If the command is killed, the store has all of the rows or none, and you can run it again.
    """
    from millpond.executor.spark.session import spark_session
    from millpond.executor.spark_compat.import_checkpoint import import_checkpoint as imported_from

    store = StoreAt(into, storage_options, zookeeper, zookeeper_security)
    convert = None if convert_name is None else load_function(convert_name)
    workers_import_from_here()
    # Spark reads the checkpoint; the store it leaves to Python.
    place = checkpoint if scheme_of(checkpoint) else into
    session = spark_session(
        "millpond import-checkpoint", store=place, storage_options=read_options(storage_options)
    )
    options |= {
        "input": None if no_sources else stream,
        "timeout": None if timeout is None else _TIMEOUTS[timeout],
        "convert": convert,
        "spark": session,
    }
    with stages_bar("rows", ("read", "write")) as on_progress:
        if dry_run:
            found = imported_from(checkpoint, into=into, dry_run=True, told=on_progress, **options)
        else:
            with store.to_write(create=True) as opened:
                found = imported_from(checkpoint, into=opened, told=on_progress, **options)
    if as_json:
        print_json([asdict(found)])
    else:
        _print_imported(found, into, stream)


def _print_imported(found: ImportedCheckpoint, into: str, stream: str) -> None:
    has = "would have" if found.version is None else f"has at version {found.version}"
    say(
        f"{into} {has} {found.rows:,} rows of {found.computation} with {found.timers:,} timers, "
        f"from {found.operator} after batch {found.batch}"
    )
    say(f"key       {found.key}")
    for name, kind in found.columns.items():
        say(f"{name:<9} {kind}")
    if found.watermark_ms:
        say(f"watermark {time_text(found.watermark_ms * _MICROS)}")
    if found.sources:
        say(f"sources   {found.sources}, which {stream} resumes")
    if found.unfinished is not None:
        note(f"batch {found.unfinished} was not finished: its records are read again")
    cells = [(_key_text(row["key"]), row["state"], len(row["timers"] or ())) for row in found.samples]
    print_table("some of the rows", ("key", "state", "timers"), cells)


def _key_text(key: str) -> str:
    return ", ".join("null" if value is None else str(value) for value in decode_key(key))
