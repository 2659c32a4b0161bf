"""Live files: the data files of a table at one version, and the statistics that prune them.

It converts in both directions: a row file into an add action with Delta statistics, and
an add action of any writer into a `LiveFile` with the range of keys that it may hold.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import orjson

from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.rows.row import PARTITION_COLUMN
from millpond.statestore.types import TableVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from millpond.statestore.rows.files import RowFile

_KEY_CHARACTERS_MAX: Final = 64
_LAST_CHARACTER: Final = "\U0010ffff"

_UNPACKED_MAX: Final = 4_096
"""How many files a process knows again when they come in the next plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """A data file that is part of the table.

    The driver sends the same files to the same tasks in each superstep, so a file is pickled once, and a process that
    has unpickled it knows it by its bytes.

    Args:
        path: path relative to the table's root.
        size_bytes: its length.
        computation: the computation whose rows it holds ("" in tables without that partition column).
        partition_values: all partition values, as in the log.
        min_key: a lower bound of its keys; ``None`` when unknown.
        max_key: an upper bound of its keys; ``None`` when unknown.
        min_superstep: the oldest superstep among its rows; ``None`` when unknown.
        max_superstep: the newest superstep among its rows; ``None`` when unknown.
        num_records: how many row updates it holds; ``None`` when unknown.
        tags: metadata from its writer; files of other engines lack Millpond's tags.
        added_version: the table version that added it (for another engine's file that only a
            checkpoint still names, the checkpoint's).
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
    _packed: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Callable[[bytes], LiveFile], tuple[bytes]]:
        """Pickle as the bytes that were made of it first."""
        if not self._packed:
            self._packed.append(pickle.dumps(_values(self)))
        return _unpacked, (self._packed[0],)

    @property
    def interval_id(self) -> str:
        """The application id of the interval that it was written for; "" for files of other engines."""
        return self.tags.get("interval", "")

    @property
    def productions(self) -> int | None:
        """How many productions it carries; ``None`` when unknown, as after another engine's rewrite."""
        text = self.tags.get("productions")
        return None if text is None else int(text)

    def overlaps(self, interval: Interval) -> bool:
        """Whether it may hold keys of the interval."""
        return (
            self.computation == interval.computation
            and (self.max_key is None or self.max_key >= interval.low)
            and (interval.high is None or self.min_key is None or self.min_key < interval.high)
        )

    def lies_in(self, interval: Interval) -> bool:
        """Whether all of its keys are known to lie in the interval."""
        if self.interval_id == interval.app_id:
            return True
        if self.computation != interval.computation or self.min_key is None or self.max_key is None:
            return False
        return interval.contains(self.min_key) and interval.contains(self.max_key)

    @staticmethod
    def from_add(add: Add, version: TableVersion) -> LiveFile:
        """The live file of an add action that was committed, or read from a checkpoint, at ``version``."""
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


_NAMES: Final = tuple(one.name for one in fields(LiveFile) if one.init)
_values: Final = attrgetter(*_NAMES)


@lru_cache(_UNPACKED_MAX)
def _unpacked(packed: bytes) -> LiveFile:
    values = pickle.loads(packed)  # noqa: S301 - a part of what is being unpickled
    return LiveFile(**dict(zip(_NAMES, values, strict=True)))


def row_file_to_add(
    file: RowFile,
    interval: Interval,
    *,
    version: TableVersion,
    modification_time_ms: int,
    rewrite: bool = False,
) -> Add:
    """The add action of a row file.

    Args:
        file: the written file.
        interval: the interval whose rows it holds.
        version: the table version that will add it; kept as a tag for checkpoints.
        modification_time_ms: the writer's wall time.
        rewrite: true when it holds rows of older commits, as a compaction's output does: then its lease,
            commit number and superstep bound its rows only from above, and are left out
            of the statistics, which readers treat as exact.
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


def row_file_moved(file: LiveFile, computation: str, modification_time_ms: int, stats: str | None) -> Add:
    """The add action that makes a live file one of another computation: its path and its bytes stay.

    Of two add actions with one path the later one counts; the partition is what the action says, not the path.

    Args:
        file: the live file.
        computation: the one that it is to belong to.
        modification_time_ms: the writer's wall time.
        stats: the file's statistics as the log has them.
    """
    interval = Interval.from_app_id(file.interval_id)
    moved = {} if interval is None else {"interval": replace(interval, computation=computation).app_id}
    return Add(
        path=file.path,
        size_bytes=file.size_bytes,
        partition_values={**file.partition_values, PARTITION_COLUMN: computation},
        modification_time_ms=modification_time_ms,
        stats=stats,
        tags={**file.tags, **moved},
        data_change=True,
    )


def _number_tag(tags: Mapping[str, str], name: str) -> int | None:
    # Only together with our own tag: another engine may use the same name for something else.
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
    # A truncated key must stay an upper bound, so the greatest character replaces the rest.
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
