"""Live files: a table's data files at one version, the statistics that prune them, and their index."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any, Final

import orjson

from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.rows.files import RowFile
from millpond.statestore.rows.row import PARTITION_COLUMN
from millpond.statestore.types import TableVersion

_KEY_CHARACTERS_MAX: Final = 64
# Of a number of 64 bits.
_DIGITS_MAX: Final = 19
_LAST_CHARACTER: Final = "\U0010ffff"
PENDING: Final = "pending"
"""The tag in which a file says what its interval still owes."""
_PENDING_VERSION: Final = "pending_version"
_CHANGED: Final = "changed_version"

_UNPACKED_MAX: Final = 4_096
"""Number of files that a process recognises when the next plan repeats them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFile:
    """A data file that is part of the table.

    ``computation`` is "" in tables without that partition column. Keys and supersteps bound the rows from
    below and above; they and ``num_records``, the number of row updates, are ``None`` when unknown. Files of
    other engines lack Millpond's tags; if only a checkpoint still names such a file, ``added_version`` is the
    checkpoint's.
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
        if not self._packed:
            self._packed.append(pickle.dumps(_values(self)))
        return _unpacked, (self._packed[0],)

    @property
    def interval_id(self) -> str:
        """Application id of the interval that the file was written for; "" for files of other engines."""
        return self.tags.get("interval", "")

    @property
    def productions(self) -> int | None:
        """Number of productions in the file; ``None`` when unknown, as after another engine's rewrite."""
        return _number(self.tags.get("productions", ""))

    @property
    def changed_version(self) -> TableVersion:
        """The newest version that may have changed a row of the file; a compaction moves rows without changing them."""
        known = _number_tag(self.tags, _CHANGED)
        return self.added_version if known is None else TableVersion(known)

    def overlaps(self, interval: Interval) -> bool:
        return (
            self.computation == interval.computation
            and (self.max_key is None or self.max_key >= interval.low)
            and (interval.high is None or self.min_key is None or self.min_key < interval.high)
        )

    def lies_in(self, interval: Interval) -> bool:
        """Return True if all keys of the file are known to lie in the interval."""
        if self.interval_id == interval.app_id:
            return True
        if self.computation != interval.computation or self.min_key is None or self.max_key is None:
            return False
        return interval.contains(self.min_key) and interval.contains(self.max_key)

    @staticmethod
    def from_add(add: Add, version: TableVersion) -> LiveFile:
        """Return the live file of an action committed at ``version``, or read from a checkpoint of it."""
        stats = _parse(add.stats)
        low, high = _known(stats, "minValues", dict) or {}, _known(stats, "maxValues", dict) or {}
        added = _number_tag(add.tags, "version")
        return LiveFile(
            path=add.path,
            size_bytes=add.size_bytes,
            computation=add.partition_values.get(PARTITION_COLUMN) or "",
            partition_values=add.partition_values,
            min_key=_known(low, "key", str),
            max_key=_known(high, "key", str),
            min_superstep=_known(low, "superstep", int),
            max_superstep=_known(high, "superstep", int, _number_tag(add.tags, "superstep")),
            num_records=_known(stats, "numRecords", int),
            tags=add.tags,
            added_version=version if added is None else TableVersion(added),
        )


def recorded_pending(files: Collection[LiveFile], interval: Interval) -> str | None:
    """Return what the last change of an interval recorded as its pending work; ``None`` if that change recorded nothing.

    ``files`` are all live files of the interval. A change without a record is one of an earlier version, of another
    engine, or of a former interval with some of the keys.
    """
    newest = _newest_pending(files, interval)
    if newest is None or any(file.changed_version > newest[0] for file in files):
        return None
    return newest[1]


def _newest_pending(files: Iterable[LiveFile], interval: Interval) -> tuple[TableVersion, str] | None:
    """Return the newest record among an interval's own files, and the version at which it was true."""
    return max(
        (
            (TableVersion(_number_tag(file.tags, _PENDING_VERSION) or file.added_version), file.tags[PENDING])
            for file in files
            if PENDING in file.tags and file.interval_id == interval.app_id
        ),
        default=None,
    )


def tags_of_compacted(replaced: Collection[LiveFile], interval: Interval) -> dict[str, str]:
    """Return what the file that replaces an interval's own files says about them; nothing about those of former intervals."""
    if any(file.interval_id != interval.app_id for file in replaced):
        # Only some of their rows are in the file.
        return {}
    tags = {_CHANGED: str(max(file.changed_version for file in replaced))}
    newest = _newest_pending(replaced, interval)
    # What the youngest of them recorded stays the interval's last record.
    return tags if newest is None else {**tags, PENDING: newest[1], _PENDING_VERSION: str(newest[0])}


_NAMES: Final = tuple(one.name for one in fields(LiveFile) if one.init)
_values: Final = attrgetter(*_NAMES)


@lru_cache(_UNPACKED_MAX)
def _unpacked(packed: bytes) -> LiveFile:
    values = pickle.loads(packed)  # noqa: S301 - a part of what is being unpickled
    return LiveFile(**dict(zip(_NAMES, values, strict=True)))


def row_file_to_add(
    file: RowFile,
    interval: Interval,
    version: TableVersion,
    modification_time_ms: int,
    *,
    rewrite: bool = False,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Add:
    """Return the add action of a row file of ``interval``, to be committed as ``version``, with further ``tags``.

    ``rewrite`` is True for the output of a compaction. Then lease, commit number and superstep bound its rows only from
    above, so they stay out of the statistics, which readers treat as exact.
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
            **tags,
        },
        data_change=not rewrite,
    )


def row_file_moved(file: LiveFile, computation: str, modification_time_ms: int, stats: str | None) -> Add:
    """Return the add action that moves a live file to another computation; its path and its bytes stay.

    Of two add actions with one path the later one counts, and readers take the partition from the action, not the path.
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
    return _number(tags.get(name, "")) if "interval" in tags else None


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else None


def _statistics(file: RowFile, *, rewrite: bool) -> str:
    names = () if rewrite else ("sequencer", "commit_number", "superstep")
    exact = {name: int(getattr(file, name)) for name in names}
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


def _known(values: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a statistic; the default if it is missing or not of this type, so that it does not prune."""
    value = values.get(name)
    return value if type(value) is kind else default


def _parse(stats: str | None) -> dict[str, Any]:
    if not stats:
        return {}
    try:
        parsed = orjson.loads(stats)
    except ValueError:
        # Statistics only prune; a file whose statistics cannot be read is simply never pruned.
        return {}
    return parsed if isinstance(parsed, dict) else {}


_AGE: Final = attrgetter("added_version", "path")


class FileIndex:
    """Live files, grouped by computation and then by the interval that they were written for.

    `put` and `remove` take constant time; the cost of `files_of` does not grow with the number of intervals. Files of
    other engines name no interval and form the group "", in which key ranges decide.
    """

    def __init__(self) -> None:
        self._by_path: dict[str, LiveFile] = {}
        self._statistics: dict[str, str] = {}
        self._computations: dict[str, _Groups] = {}
        self.size_bytes: int = 0

    @property
    def file_count(self) -> int:
        return len(self._by_path)

    @property
    def files(self) -> tuple[LiveFile, ...]:
        """Oldest first."""
        return _in_order(self._by_path.values())

    @property
    def computations(self) -> tuple[str, ...]:
        return tuple(sorted(self._computations))

    def file(self, path: str) -> LiveFile | None:
        return self._by_path.get(path)

    def statistics_of(self, path: str) -> str | None:
        return self._statistics.get(path)

    def put(self, file: LiveFile, statistics: str | None = None) -> None:
        self.remove(file.path)
        self._by_path[file.path] = file
        if statistics is not None:
            self._statistics[file.path] = statistics
        self.size_bytes += file.size_bytes
        groups = self._computations.get(file.computation)
        if groups is None:
            groups = self._computations[file.computation] = _Groups()
        groups.put(file)

    def remove(self, path: str) -> None:
        file = self._by_path.pop(path, None)
        if file is None:
            return
        self._statistics.pop(path, None)
        self.size_bytes -= file.size_bytes
        groups = self._computations[file.computation]
        groups.remove(file)
        if not groups.files:
            del self._computations[file.computation]

    def files_in(self, computation: str) -> tuple[LiveFile, ...]:
        groups = self._computations.get(computation)
        return (
            () if groups is None else _in_order(chain.from_iterable(map(dict.values, groups.files.values())))
        )

    def files_of(self, interval: Interval) -> tuple[LiveFile, ...]:
        """Return the live files that can hold keys of the interval, oldest first.

        After a change of boundaries, or a rewrite by another engine, they may hold keys of other intervals too.
        """
        groups = self._computations.get(interval.computation)
        return () if groups is None else _in_order(groups.in_interval(interval))


class _Groups:
    """The live files of a computation by the application id that they name; no group is empty."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, LiveFile]] = {}
        # Made when they are asked for: the groups without an interval, and those with one in key order, each with its
        # low and high key, the highest key so far (no bound is ``None``), and its id.
        self._others: list[str] = []
        self._spans: list[tuple[str, str | None, str | None, str]] | None = None

    def put(self, file: LiveFile) -> None:
        group = self.files.get(file.interval_id)
        if group is None:
            group = self.files[file.interval_id] = {}
            self._spans = None
        group[file.path] = file

    def remove(self, file: LiveFile) -> None:
        group = self.files[file.interval_id]
        del group[file.path]
        if not group:
            del self.files[file.interval_id]
            self._spans = None

    def in_interval(self, interval: Interval) -> list[LiveFile]:
        own = interval.app_id
        files = list(self.files.get(own, {}).values())
        for app_id in self._overlapping(interval):
            if app_id != own:
                files += [file for file in self.files[app_id].values() if file.overlaps(interval)]
        return files

    def _overlapping(self, interval: Interval) -> Iterator[str]:
        """Yield the groups whose interval shares a key with ``interval``, and those without an interval."""
        spans = self._made_spans() if self._spans is None else self._spans
        yield from self._others
        end = len(spans) if interval.high is None else bisect_left(spans, interval.high, key=itemgetter(0))
        for index in range(end - 1, -1, -1):
            _, high, reach, app_id = spans[index]
            if reach is not None and reach <= interval.low:
                return
            if high is None or high > interval.low:
                yield app_id

    def _made_spans(self) -> list[tuple[str, str | None, str | None, str]]:
        parsed = [(Interval.from_app_id(app_id), app_id) for app_id in self.files]
        self._others = [app_id for interval, app_id in parsed if interval is None]
        self._spans = []
        reach: str | None = ""
        for low, app_id, high in sorted((known.low, app_id, known.high) for known, app_id in parsed if known):
            reach = None if reach is None or high is None else max(reach, high)
            self._spans.append((low, high, reach, app_id))
        return self._spans


def _in_order(files: Iterable[LiveFile]) -> tuple[LiveFile, ...]:
    return tuple(sorted(files, key=_AGE))
