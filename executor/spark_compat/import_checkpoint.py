"""A stopped Spark query's checkpoint, imported: its state as rows of a store, and its sources' positions for a pipeline.

Rows, timers, input positions and watermarks become visible in one commit. A new Spark checkpoint is written before the
commit. If the process dies in between, no commit names that checkpoint: the pipeline refuses it, and the next import
replaces it.

A checkpoint has an entry in ``offsets`` for each planned batch and in ``commits`` for each finished one, the sources'
files in ``sources``, ``state``, and the query's id in ``metadata``. All but ``state`` is copied to a local folder, so
that local code can read and change it wherever the checkpoint lies.
"""

from __future__ import annotations

import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
import pyarrow as pa
from pyspark.sql import SparkSession

from millpond.executor.inputs.positions import input_positions, percentile_watermark_app_id
from millpond.executor.replay.spark_checkpoint import (
    by_query,
    checkpoints_in,
    forget_later_files,
    rewind_checkpoints,
)
from millpond.executor.run.options import CHECKPOINTS_FOLDER
from millpond.executor.spark.frames import checkpoint_path
from millpond.executor.spark.key_sql import arrow_key_columns
from millpond.executor.spark.session import refuse_connect, spark_session
from millpond.executor.spark_compat.state_rows import (
    Convert,
    batches_of,
    find_operator,
    reading_checkpoint,
    state_rows,
)
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.statestore.app_ids import AppId
from millpond.statestore.arguments import check_flags
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.history.lineage import local_folder
from millpond.statestore.loading.load import LoadBeginning, LoadProgress
from millpond.statestore.objects.hadoop import literal_pattern
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.obstore import file_here
from millpond.statestore.rows.key_columns import key_columns_of, key_word
from millpond.statestore.store import Store
from millpond.statestore.system import SystemRng
from millpond.statestore.types import Rng

_METADATA: Final = "metadata"
_COMMITS: Final = "commits"
_OFFSETS: Final = "offsets"
_PARTS: Final = (_METADATA, _OFFSETS, _COMMITS, "sources")
_NO_OFFSET: Final = "-"
_MILLIS: Final = 1_000
_VERSIONS: Final = ("v1",)
# Spark's numbers are of 64 bits.
_BATCH: Final = re.compile(r"0|[1-9][0-9]{0,17}")

# Snapshots of RocksDB, of an operator's only store and of one of several.
_ZIPS: Final = ("state/*/*/*.zip", "state/*/*/*/*.zip")
_ZIP: Final = "snapshot.zip"
_MANIFEST: Final = "metadata"
_MANIFEST_BYTES_MAX: Final = 64 << 20
_FILE_NAME: Final = re.compile(r"[\w-][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCheckpoint:
    """A query's progress, read from its checkpoint.

    Attributes:
        batch: the last finished batch.
        unfinished: the last planned batch after it; ``None`` if there is none.
        watermark_ms: the watermark of ``batch``; 0 without one.
        next_watermark_ms: the watermark after the records of ``batch``.
        offsets: the sources' positions after ``batch``, in Spark's form.
    """

    path: str
    batch: int
    unfinished: int | None
    watermark_ms: int
    next_watermark_ms: int
    offsets: tuple[str, ...]
    folder: Path

    def entry(self) -> str:
        """Return Spark's entry for the batch without the old query's settings, which must not apply to a new one."""
        version, settings, *offsets = _lines(self.folder / _OFFSETS / str(self.batch))
        kept = {**orjson.loads(settings), "conf": {}}
        return "\n".join([version, orjson.dumps(kept).decode(), *offsets])


def fetch_checkpoint(spark: SparkSession, path: str | Path, folder: Path) -> QueryCheckpoint:
    """Copy a checkpoint except for its state to an empty local folder, and read it."""
    place = str(path)
    hadoop: Any = spark._jvm.org.apache.hadoop  # type: ignore[union-attr]  # noqa: SLF001
    hadoop_settings: Any = spark._jsc.hadoopConfiguration()  # noqa: SLF001
    root = hadoop.fs.Path(place if urlsplit(place).scheme else str(file_here(place)))
    files, own = root.getFileSystem(hadoop_settings), hadoop.fs.FileSystem.getLocal(hadoop_settings)
    _refuse_links(place)
    with reading_checkpoint(place):
        for part in _PARTS:
            source, copied = hadoop.fs.Path(root, part), hadoop.fs.Path(str(folder / part))
            if files.exists(source):
                hadoop.fs.FileUtil.copy(files, source, own, copied, False, hadoop_settings)
        for pattern in _ZIPS:
            for found in files.globStatus(hadoop.fs.Path(literal_pattern(root.toString()), pattern)) or ():
                zipped = hadoop.fs.Path(str(folder / _ZIP))
                hadoop.fs.FileUtil.copy(files, found.getPath(), own, zipped, False, hadoop_settings)
                _refuse_paths(folder / _ZIP, str(found.getPath()))
    (folder / _ZIP).unlink(missing_ok=True)
    batches = {
        part: {int(path.name) for path in (folder / part).glob("*") if _BATCH.fullmatch(path.name)}
        for part in (_COMMITS, _OFFSETS)
    }
    if not batches[_OFFSETS]:
        raise InvalidError("no checkpoint of a streaming query at this path", path=place)
    # An entry in offsets alone is a planned batch, whose records the pipeline must read again.
    done = max(batches[_COMMITS] & batches[_OFFSETS], default=None)
    if done is None:
        raise InvalidError("the query has finished no batch, so it has no state", path=place)
    version, settings, *offsets = _lines(folder / _OFFSETS / str(done), 2)
    if version not in _VERSIONS:
        raise DataError("cannot read this version of Spark's offsets", path=place, version=version)
    committed = _lines(folder / _COMMITS / str(done), 2)
    query = str(_object(folder / _METADATA, _lines(folder / _METADATA)[0]).get("id", ""))
    # A running query would move its state and positions during the import.
    if any(str(running.id) == query for running in spark.streams.active):
        raise InvalidError("the query runs: stop it first", path=place, query=query)
    return QueryCheckpoint(
        path=place,
        batch=done,
        unfinished=max((batch for batch in batches[_OFFSETS] if batch > done), default=None),
        watermark_ms=_time_ms(folder / _OFFSETS, settings, "batchWatermarkMs"),
        next_watermark_ms=_time_ms(folder / _COMMITS, committed[1], "nextBatchWatermarkMs"),
        offsets=tuple(offset for offset in offsets if offset != _NO_OFFSET),
        folder=folder,
    )


def _refuse_links(place: str) -> None:
    """Refuse links and FIFOs in a checkpoint on this machine, which Spark would follow and wait for."""
    local = local_folder(place)
    if local is not None and local.is_dir():
        LocalObjects(local, "os_cache").refuse_links()


def _refuse_paths(path: Path, name: str) -> None:
    """Refuse a snapshot of RocksDB that names files by paths: Spark would write its files anywhere."""
    try:
        with zipfile.ZipFile(path) as zipped:
            names = zipped.namelist()
            if _MANIFEST in names:
                with zipped.open(_MANIFEST) as file:
                    text = file.read(_MANIFEST_BYTES_MAX)
                # The first line is the format's version.
                names += _file_names(orjson.loads(text.partition(b"\n")[2]))
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError) as error:
        raise DataError("a snapshot of the checkpoint is damaged", path=name, reason=error) from error
    wrong = next((each for each in names if not _FILE_NAME.fullmatch(each)), None)
    if wrong is not None:
        raise DataError(
            "a snapshot of the checkpoint names a file outside of its folder", path=name, file=wrong
        )


def _file_names(manifest: Any) -> list[str]:
    """Return all names of files in RocksDB's list of a snapshot's files."""
    if isinstance(manifest, list):
        return [name for part in manifest for name in _file_names(part)]
    if not isinstance(manifest, dict):
        return []
    own = [value for key, value in manifest.items() if key.endswith("FileName") and isinstance(value, str)]
    return [*own, *(name for part in manifest.values() for name in _file_names(part))]


def put_checkpoint(checkpoint: QueryCheckpoint, target: Path, query: str) -> None:
    """Replace ``target`` by the checkpoint of a new, stateless query that continues after the last finished batch."""
    staged = target.with_name(f".{target.name}.importing")
    # Make the folder above, without a link that the calls below would follow, or a FIFO that they would wait for.
    LocalObjects(target.parent, "os_cache").refuse_links()
    shutil.rmtree(staged, ignore_errors=True)
    shutil.copytree(checkpoint.folder, staged, ignore=shutil.ignore_patterns(".*.crc"))
    (staged / _METADATA).write_bytes(orjson.dumps({"id": query}))
    rewind_checkpoints(staged, {query: checkpoint.batch})
    (staged / _OFFSETS / str(checkpoint.batch)).write_text(checkpoint.entry())
    forget_later_files(staged, checkpoint.batch)
    # Rename a complete folder: a crash leaves no half-written checkpoint for Spark to continue from.
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def _lines(path: Path, least: int = 1) -> list[str]:
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError("an entry of the checkpoint is damaged", path=path, reason=error) from error
    if len(lines) < least:
        raise DataError("an entry of the checkpoint is damaged", path=path, lines=len(lines))
    return lines


def _time_ms(path: Path, text: str, name: str) -> int:
    found = _object(path, text).get(name, 0)
    if type(found) is not int or not 0 <= found * _MILLIS <= INSTANT_MAX_US:
        raise DataError("an entry of the checkpoint is damaged", path=path, field=name, value=found)
    return found


def _object(path: Path, text: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise DataError("an entry of the checkpoint is damaged", path=path, text=text[:100])
    return found


_SAMPLES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCheckpoint:
    """The result of an import, or its forecast.

    Attributes:
        version: the table version that has the rows; ``None`` for a dry run.
        computation: the computation.
        operator: Spark's name of the operator.
        batch: the last finished batch of the query.
        unfinished: a later, unfinished batch, whose records the pipeline reads again. ``None`` if there is none.
        rows: the number of keys.
        timers: the number of timers, including the expiry timers of times to live.
        key: the key's columns, as Spark writes their types.
        columns: the type in Spark, by variable or ``state``.
        watermark_ms: the query's watermark; 0 without one.
        sources: the number of imported sources; 0 if ``input`` is ``None``.
        samples: some of the rows, in the store's form.
    """

    version: int | None
    computation: str
    operator: str
    batch: int
    unfinished: int | None
    rows: int
    timers: int
    key: str
    columns: Mapping[str, str]
    watermark_ms: int
    sources: int
    samples: tuple[Mapping[str, Any], ...] = field(default=())


def import_checkpoint(
    checkpoint: str | Path,
    *,
    computation: str,
    into: Store | str | Path,
    operator: int | None = None,
    pipeline: str | None = None,
    input: str | None = "input",  # noqa: A002 - the word of the command and of the users
    plain_key: bool = False,
    timeout: str | None = None,
    event_time: str | None = None,
    convert: Convert | None = None,
    intervals: int | None = None,
    dry_run: bool = False,
    spark: SparkSession | None = None,
    rng: Rng | None = None,
    told: LoadProgress = lambda *_: None,
) -> ImportedCheckpoint:
    """Import the state of a stopped Spark query into a store, so that a pipeline continues with its sources.

    The checkpoint is only read. Afterwards, run `transform_with_state`, `apply_in_pandas_with_state` or a pipeline with
    a computation of that name on the store, with the query's frame.

    Args:
        checkpoint: the query's checkpoint, anywhere Spark can read.
        computation: the name of the computation that takes the state over.
        into: the store. It is created if it does not exist.
        operator: Spark's number of the stateful operator, not needed if the query has only one.
        pipeline: the computation's pipeline. The default, the computation's name, is right for `transform_with_state`.
        input: the injected stream that resumes the query's sources. ``None`` leaves the sources alone.
        plain_key: whether the computation's key is given as a column (``key="card"``), not as a list of columns.
        timeout: the ``GroupStateTimeout`` of ``applyInPandasWithState``, which the checkpoint does not record. It is
            not needed if no key has a timeout.
        event_time: the watermark's column if it is part of the key of ``dropDuplicates``, so that keys expire as in
            Spark. Without it, imported keys are kept indefinitely.
        convert: makes a key's state of an aggregation from two mappings, the key's columns and the buffers. The default
            state is the object of the buffers. A key for which it returns ``None`` is left out.
        intervals: the number of the computation's key intervals, as in its option ``intervals``.
        dry_run: count, and show some rows; write nothing.
        spark: the session that reads. The default is the active session, or a new one.
        rng: the source of names.
        told: called with ``"read"`` or ``"write"``, the number of rows so far, and the total if it is known.

    Returns:
        Counts, positions and some rows.

    Raises:
        InvalidError: there is no such checkpoint or operator, its state cannot be moved, the computation has rows, or
            the input already has positions in its sources.
        ConflictError: the pipeline runs.
        DataError: the checkpoint is damaged.

    Example::

        mp.import_checkpoint("checkpoints/totals", computation="RunningTotal", into="pond")
        run = mp.transform_with_state(payments, keys="card", processor=RunningTotal(), store="pond", …)
    """
    check_flags(plain_key=plain_key, dry_run=dry_run)
    session = spark or spark_session("millpond import")
    refuse_connect(session)
    with (
        TemporaryDirectory(prefix="millpond-import-", ignore_cleanup_errors=True) as folder,
        ExitStack() as opened,
    ):
        query = fetch_checkpoint(session, checkpoint, Path(folder))
        source = find_operator(session, query.path, operator)
        rows = state_rows(
            session,
            query.path,
            source,
            query.batch,
            plain_key=plain_key,
            timeout=timeout,
            event_time=event_time,
            convert=convert,
        )
        counted = _Counted(batches_of(rows))
        version = None
        if dry_run:
            for _ in counted:
                told("read", counted.rows, None)
        else:
            store = into if isinstance(into, Store) else opened.enter_context(closing(Store.open(into)))
            beginning = _beginning(
                store, query, pipeline or computation, computation, input, rng or SystemRng()
            )
            if not plain_key:
                key = key_word(key_columns_of(arrow_key_columns(rows.key)))
                beginning = replace(beginning, words=(AppId.KEY_COLUMNS.of(computation, key),))
            version = store.load(
                computation, counted.reader(), intervals=intervals, told=told, beginning=beginning
            ).version
        return ImportedCheckpoint(
            version=version,
            computation=computation,
            operator=source.name,
            batch=query.batch,
            unfinished=query.unfinished,
            rows=counted.rows,
            timers=counted.timers,
            key=rows.key.simpleString().removeprefix("struct<").removesuffix(">"),
            columns=rows.columns,
            watermark_ms=query.next_watermark_ms,
            sources=0 if input is None else len(query.offsets),
            samples=tuple(counted.samples),
        )


def _beginning(
    store: Store, query: QueryCheckpoint, pipeline: str, computation: str, stream: str | None, rng: Rng
) -> LoadBeginning:
    """Write the new query's checkpoint, and return the positions and watermarks to commit with the rows."""
    if stream is None:
        return LoadBeginning()
    root = local_folder(store.path)
    if root is None:
        raise InvalidError(
            "cannot import sources into a store that is not a local folder: pass input=None to leave them",
            path=store.path,
        )
    positions = store.committer.refresh().txns
    # A second checkpoint for an input in use would make Spark read its records twice, or skip some.
    known = input_positions(positions, pipeline, stream)
    target = Path(checkpoint_path(str(root / CHECKPOINTS_FOLDER), stream))
    own = checkpoints_in(target).keys()
    if known or by_query(positions).keys() & own:
        raise InvalidError(
            "the input already has a place in its sources: pass input=None to leave the query's sources alone",
            pipeline=pipeline,
            input=stream,
            checkpoint=target,
        )
    # A random UUID, the form of Spark's query ids.
    token = rng.token()
    query_id = f"{token[:8]}-{token[8:12]}-4{token[13:16]}-8{token[17:20]}-{token[20:]}"
    # The checkpoint comes before the commit that names it: the reverse could leave a position without a checkpoint.
    put_checkpoint(query, target, query_id)
    position = AppId.INPUT.of(pipeline, stream, query_id)
    # The operator has seen the watermark of its last batch. The injector's already includes the batch's records.
    watermarks = {
        percentile_watermark_app_id(pipeline, "injector", stream): query.next_watermark_ms * _MILLIS,
        percentile_watermark_app_id(pipeline, "computation", computation): query.watermark_ms * _MILLIS,
    }
    return LoadBeginning(
        positions={position: query.batch, **{name: at for name, at in watermarks.items() if at > 0}},
        source_offsets={position: query.entry()},
    )


class _Counted:
    """Counts rows and timers during the read, and keeps some rows as samples."""

    def __init__(self, batches: pa.RecordBatchReader) -> None:
        self._batches = batches
        self.rows = 0
        self.timers = 0
        self.samples: list[dict[str, Any]] = []

    def reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self._batches.schema, iter(self))

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._batches:
            self.rows += batch.num_rows
            self.timers += len(batch.column("timers").flatten())
            if len(self.samples) < _SAMPLES:
                self.samples += batch.slice(0, _SAMPLES - len(self.samples)).to_pylist()
            yield batch
