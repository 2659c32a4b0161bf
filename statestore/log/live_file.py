"""
Live files: the data files of a table at one version, and the statistics that prune them.

Both directions are here: a row file becomes an add action with Delta statistics, and
an add action, whoever wrote it, becomes a `LiveFile` with the key range it can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from millpond.statestore.log.action import Add
from millpond.statestore.rows.row import PARTITION_COLUMN
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millpond.statestore.interval import Interval
    from millpond.statestore.rows.files import RowFile

__all__ = ["LiveFile", "row_file_to_add"]

_KEY_CHARACTERS_MAX: Final = 64
_LAST_CHARACTER: Final = "\U0010ffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """
    A data file that is part of the table.

    Args:
        path: where it lies, relative to the table's root.
        size_bytes: its length.
        computation: whose rows it holds ("" in tables without that partition column).
        partition_values: all partition values, as the log has them.
        min_key: a lower bound of its keys; ``None`` when unknown.
        max_key: an upper bound of its keys; ``None`` when unknown.
        min_superstep: the oldest superstep among its rows; ``None`` when unknown.
        max_superstep: the newest superstep among its rows; ``None`` when unknown.
        num_records: how many row updates it holds; ``None`` when unknown.
        tags: what its writer said about it; files of other engines have none of ours.
        added_version: the table version that added it (for a foreign file that only a
            checkpoint still tells of, the checkpoint's).
    """

    path: str
    size_bytes: int
    computation: str
    partition_values: Mapping[str, str | None]
    min_key: str | None
    max_key: str | None
    min_superstep: int | None
    max_superstep: int | None
    num_records: int | None
    tags: Mapping[str, str]
    added_version: TableVersion

    @property
    def interval_id(self) -> str:
        """
        The application id of the interval it was written for; "" for files of other engines.
        """
        return self.tags.get("interval", "")

    @property
    def productions(self) -> int | None:
        """
        How many productions it carries; ``None`` when unknown, as after another engine's rewrite.
        """
        text = self.tags.get("productions")
        return None if text is None else int(text)

    def overlaps(self, interval: Interval) -> bool:
        """
        Whether it can hold keys of the interval.
        """
        return (
            self.computation == interval.computation
            and (self.max_key is None or self.max_key >= interval.low)
            and (interval.high is None or self.min_key is None or self.min_key < interval.high)
        )

    @staticmethod
    def from_add(add: Add, version: TableVersion) -> LiveFile:
        """
        What an add action says, with the version that it was committed or read at.
        """
        stats = _parse(add.stats)
        low, high = stats.get("minValues") or {}, stats.get("maxValues") or {}
        added = _number_tag(add.tags, "version")
        return LiveFile(
            path=add.path,
            size_bytes=add.size_bytes,
            computation=add.partition_values.get(PARTITION_COLUMN) or "",
            partition_values=add.partition_values,
            min_key=low.get("key"),
            max_key=high.get("key"),
            min_superstep=low.get("superstep"),
            max_superstep=high.get("superstep", _number_tag(add.tags, "superstep")),
            num_records=stats.get("numRecords"),
            tags=add.tags,
            added_version=version if added is None else TableVersion(added),
        )


def row_file_to_add(
    file: RowFile,
    interval: Interval,
    *,
    version: TableVersion,
    modification_time_ms: int,
    rewrite: bool = False,
) -> Add:
    """
    The add action of a row file.

    Args:
        file: the file that was written.
        interval: whose rows it holds.
        version: the table version that it will be part of, kept as a tag for checkpoints.
        modification_time_ms: the writer's wall time.
        rewrite: true when it holds rows of older commits, as a compaction does: then its lease,
            commit number and superstep bound its rows from above only, and are left out
            of the statistics, which readers take as exact.
    """
    return Add(
        path=file.path,
        size_bytes=file.size_bytes,
        partition_values={PARTITION_COLUMN: interval.computation},
        modification_time_ms=modification_time_ms,
        stats=_statistics(file, rewrite=rewrite),
        tags={
            "interval": interval.app_id,
            "superstep": str(file.superstep),
            "productions": str(file.productions),
            "version": str(version),
        },
        data_change=not rewrite,
    )


def _number_tag(tags: Mapping[str, str], name: str) -> int | None:
    # Only beside our own tag: another engine may mean something else by the word.
    text = tags.get(name, "") if "interval" in tags else ""
    return int(text) if text.isdecimal() else None


def _statistics(file: RowFile, *, rewrite: bool) -> str:
    exact = (
        {}
        if rewrite
        else {
            "sequencer": int(file.sequencer),
            "commit_number": int(file.commit_number),
            "superstep": int(file.superstep),
        }
    )
    high = _shorten_upward(file.max_key)
    stats = {
        "numRecords": file.rows,
        "minValues": {"key": file.min_key[:_KEY_CHARACTERS_MAX], **exact},
        "maxValues": exact if high is None else {"key": high, **exact},
        "nullCount": dict.fromkeys(("key", *exact), 0),
    }
    return orjson.dumps(stats).decode()


def _shorten_upward(key: str) -> str | None:
    # A cut key must stay an upper bound, so the greatest character is put in place of the rest.
    if len(key) <= _KEY_CHARACTERS_MAX:
        return key
    if key[_KEY_CHARACTERS_MAX] == _LAST_CHARACTER:
        return None
    return key[:_KEY_CHARACTERS_MAX] + _LAST_CHARACTER


def _parse(stats: str | None) -> dict[str, Any]:
    if not stats:
        return {}
    try:
        parsed = orjson.loads(stats)
    except ValueError:
        # Statistics only prune; a file whose statistics cannot be read is simply never pruned.
        return {}
    return parsed if isinstance(parsed, dict) else {}
