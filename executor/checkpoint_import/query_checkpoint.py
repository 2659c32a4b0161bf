"""The checkpoint of a stopped Spark query: up to which batch it is done, what its sources had given, and its watermarks.

A checkpoint has a folder ``offsets`` with an entry for each batch that was planned, a folder ``commits`` with one for
each that is done, ``sources`` with what a source notes of its own, ``state``, and a file ``metadata`` with the query's
id. All but the state is copied to a folder of this machine, so that it is read and changed in one way wherever it lies.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import orjson

from millpond.executor.repair.file_source_log import forget_later_files
from millpond.executor.repair.spark_checkpoint import rewind_checkpoints
from millpond.statestore.errors import DataError, InvalidError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_METADATA: Final = "metadata"
_COMMITS: Final = "commits"
_OFFSETS: Final = "offsets"
_PARTS: Final = (_METADATA, _OFFSETS, _COMMITS, "sources")
_NO_OFFSET: Final = "-"
_VERSIONS: Final = ("v1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryCheckpoint:
    """What a checkpoint says of a query.

    Attributes:
        path: where it lies.
        query: the query's id.
        batch: the last batch that is done.
        unfinished: a later batch that was planned; ``None`` if there is none.
        watermark_ms: the watermark that this batch had; 0 without one.
        next_watermark_ms: the watermark that its records have moved it to.
        offsets: what its sources had given by the end of it, each as Spark writes it.
        folder: the copy on this machine.
    """

    path: str
    query: str
    batch: int
    unfinished: int | None
    watermark_ms: int
    next_watermark_ms: int
    offsets: tuple[str, ...]
    folder: Path

    def entry(self) -> str:
        """Spark's entry for the batch without the settings that the query had, which are not those of another one."""
        version, settings, *offsets = _lines(self.folder / _OFFSETS / str(self.batch))
        kept = {**orjson.loads(settings), "conf": {}}
        return "\n".join([version, orjson.dumps(kept).decode(), *offsets])


def fetch_checkpoint(spark: SparkSession, path: str | Path, folder: Path) -> QueryCheckpoint:
    """Copy a checkpoint, but for its state, and read it.

    Args:
        spark: reads it, wherever Spark can.
        path: the checkpoint, as it was given to the query.
        folder: an empty folder of this machine.

    Raises:
        InvalidError: there is no checkpoint of a streaming query, it has not finished a batch, or the session runs it.
        DataError: an entry of it cannot be read.
    """
    place = str(path)
    _copy(spark, place, folder)
    batches = {part: _numbers(folder / part) for part in (_COMMITS, _OFFSETS)}
    if not batches[_OFFSETS]:
        raise InvalidError("there is no checkpoint of a streaming query at this path", path=place)
    done = max(batches[_COMMITS] & batches[_OFFSETS], default=None)
    if done is None:
        raise InvalidError("the query has finished no batch, so it has no state", path=place)
    version, settings, *offsets = _lines(folder / _OFFSETS / str(done))
    if version not in _VERSIONS:
        raise DataError("this version of Spark's offsets is not known", path=place, version=version)
    committed = _lines(folder / _COMMITS / str(done))
    query = str(_object(folder / _METADATA, _lines(folder / _METADATA)[0]).get("id", ""))
    if any(str(running.id) == query for running in spark.streams.active):
        raise InvalidError("the query runs: stop it first", path=place, query=query)
    return QueryCheckpoint(
        path=place,
        query=query,
        batch=done,
        unfinished=max((batch for batch in batches[_OFFSETS] if batch > done), default=None),
        watermark_ms=int(_object(folder / _OFFSETS, settings).get("batchWatermarkMs", 0)),
        next_watermark_ms=int(_object(folder / _COMMITS, committed[1]).get("nextBatchWatermarkMs", 0)),
        offsets=tuple(offset for offset in offsets if offset != _NO_OFFSET),
        folder=folder,
    )


def put_checkpoint(checkpoint: QueryCheckpoint, target: Path, query: str) -> None:
    """Make the checkpoint of a query that goes on after the last batch that is done, and has no state of its own.

    Args:
        checkpoint: of the stopped query.
        target: where it is to lie; what is there is replaced.
        query: the new query's id.
    """
    staged = target.with_name(f".{target.name}.importing")
    shutil.rmtree(staged, ignore_errors=True)
    staged.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(checkpoint.folder, staged, ignore=shutil.ignore_patterns(".*.crc"))
    (staged / _METADATA).write_bytes(orjson.dumps({"id": query}))
    rewind_checkpoints(staged, {query: checkpoint.batch})
    (staged / _OFFSETS / str(checkpoint.batch)).write_text(checkpoint.entry())
    forget_later_files(staged, checkpoint.batch)
    shutil.rmtree(target, ignore_errors=True)
    staged.rename(target)


def _copy(spark: SparkSession, place: str, folder: Path) -> None:
    hadoop: Any = spark._jvm.org.apache.hadoop  # type: ignore[union-attr]  # noqa: SLF001
    settings: Any = spark._jsc.hadoopConfiguration()  # noqa: SLF001
    root = hadoop.fs.Path(place if urlsplit(place).scheme else str(Path(place).absolute()))
    files, own = root.getFileSystem(settings), hadoop.fs.FileSystem.getLocal(settings)
    for part in _PARTS:
        source = hadoop.fs.Path(root, part)
        if files.exists(source):
            hadoop.fs.FileUtil.copy(files, source, own, hadoop.fs.Path(str(folder / part)), False, settings)


def _numbers(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.glob("*") if path.name.isdecimal()}


def _lines(path: Path) -> list[str]:
    return path.read_text().split("\n")


def _object(path: Path, text: str) -> Mapping[str, Any]:
    try:
        found = orjson.loads(text)
    except ValueError as cause:
        raise DataError("an entry of the checkpoint is damaged", path=path, text=text[:100]) from cause
    if not isinstance(found, dict):
        raise DataError("an entry of the checkpoint is damaged", path=path, text=text[:100])
    return found
