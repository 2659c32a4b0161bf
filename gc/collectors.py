"""The collectors of garbage, and the round that runs each of them once.

Each finds one kind of garbage in a survey and deletes it, or only lists it on a dry run. Files of savepoints stay, and
versions at or after the published horizon keep all their files. Collecting twice is harmless, and a round that is
killed midway leaves garbage but no damage.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final
from urllib.parse import unquote

from millpond.gc.survey import Collection, Horizons, Survey, survey, version_at, write_checkpoint_at
from millpond.statestore.catalog.catalog import Catalog
from millpond.statestore.errors import DataError, InvalidError, ObjectMissingError
from millpond.statestore.failpoint import reach
from millpond.statestore.history.replayed_log import ReplayedLog, read_commit, replay_log
from millpond.statestore.history.savepoint import write_checkpoint_of
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Add
from millpond.statestore.log.checkpoint import checkpoint_path
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.log import AHEAD_MAX, Log, commit_path
from millpond.statestore.log.writer import publish_log_boundary
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.system import SystemClock
from millpond.statestore.types import Clock, Objects, Sequencer, Superstep, TableVersion

# Commits younger than this stay whatever the retention; writers trust a version that they saw for a third of it.
KEPT_MS: Final = 30_000
_DELETED_AT_ONCE: Final = 1_000
_READ_MAX: Final = 1_000
_OWN_NAME: Final = re.compile(r"^computation=([^/]*)/(\d{10,})-[0-9a-f]{32}\.parquet$")
_OF_VERSION: Final = re.compile(r"^_delta_log/(\d{20})\.(?:json|crc|checkpoint(?:\.\d+\.\d+)?\.parquet)$")


def delete_files(objects: Objects, paths: Iterable[str]) -> None:
    rest = iter(paths)
    while batch := list(islice(rest, _DELETED_AT_ONCE)):
        reach("garbage.before_delete")
        objects.delete(batch)
        reach("garbage.deleted")


def collect_removed(survey: Survey, *, dry_run: bool) -> Collection:
    """Delete data files that were removed at or before the horizon and not added again, so that no later version has them."""
    removes = {} if survey.settled is None else survey.settled.removes
    newest = survey.newest
    sizes = {
        path: remove.size_bytes or 0
        for path, remove in sorted(removes.items())
        if path in survey.data_files
        and path not in survey.pinned
        and path not in newest.adds
        # If a file was removed, added and removed again, the later removal counts.
        and newest.removes.get(path, remove).deletion_time_ms == remove.deletion_time_ms
    }
    if not dry_run:
        delete_files(survey.objects, sizes)
    return Collection(kind="vacuum", paths=tuple(sizes), freed_bytes=sum(sizes.values()))


@dataclass(frozen=True, slots=True)
class Owned:
    """The sequencer of the caller's lease on an interval, and the last superstep that the caller has committed."""

    sequencer: Sequencer
    superstep: Superstep


def collect_orphans(survey: Survey, owned: Mapping[Interval, Owned], *, dry_run: bool) -> Collection:
    """Delete row files of past supersteps that were never committed, in the intervals that the caller owns.

    A file's name contains its superstep, and a committed superstep accepts no more files. So a file of a past superstep
    that the log does not name is garbage, whoever wrote it and whenever it lands. Files with other names belong
    to other engines and stay.
    """
    still_owned: dict[str, list[tuple[Interval, Superstep]]] = {}
    for interval, known in owned.items():
        # Only the owner may conclude that a file is garbage, because only the owner knows that no compaction is
        # writing it. The files were listed before the log was read: if the log still names this owner, no other
        # owner's compaction was among them. Otherwise the caller has lost the interval, and nothing is deleted.
        fence = survey.newest.snapshot.fence_of(interval)
        if fence is not None and fence.sequencer == known.sequencer:
            still_owned.setdefault(interval.computation, []).append((interval, known.superstep))
    unnamed = tuple(_unnamed(survey, still_owned))
    needed = _needed(survey) | _added_since_horizon(survey, unnamed) if unnamed else frozenset()
    paths = tuple(path for path in unnamed if path not in needed)
    if not dry_run:
        delete_files(survey.objects, paths)
    return Collection(kind="orphans", paths=paths)


def _unnamed(survey: Survey, still_owned: Mapping[str, list[tuple[Interval, Superstep]]]) -> Iterator[str]:
    newest, reads = survey.newest, 0
    for path in sorted(survey.data_files):
        match = _OWN_NAME.match(path)
        if match is None or path in newest.adds or path in newest.removes:
            continue
        owned = still_owned.get(unquote(match[1]), [])
        past = [interval for interval, superstep in owned if int(match[2]) <= superstep]
        if not past or len(past) < len(owned):
            continue
        if _cover_everything(past):
            yield path
        elif reads < _READ_MAX:
            # Several pipelines share the dead letters, so only the keys tell whose file this is.
            reads += 1
            if _holds_only_keys_of(survey.objects, path, past):
                yield path


def _holds_only_keys_of(objects: Objects, path: str, intervals: list[Interval]) -> bool:
    try:
        keys = read_row_files(objects, [path], ["key"]).column("key").to_pylist()
    except DataError:
        # The owner of an unreadable file is unknown; keeping it costs only space.
        return False
    return all(any(interval.contains(key) for interval in intervals) for key in keys)


def _cover_everything(intervals: list[Interval]) -> bool:
    ordered = sorted(intervals, key=lambda interval: interval.low)
    highs = [interval.high for interval in ordered]
    lows = [interval.low for interval in ordered]
    return lows[0] == "" and highs[-1] is None and highs[:-1] == lows[1:]


def _needed(survey: Survey) -> frozenset[str]:
    # The replayed log may have forgotten a file that it once named, because checkpoints of other engines omit files
    # removed a week ago. So every retained version is checked: the horizon's here, later ones below.
    try:
        return survey.pinned | replay_log(Log(survey.objects), survey.horizon.version).adds.keys()
    except ObjectMissingError:
        # The log does not reach back that far: that version is unreadable.
        return survey.pinned


def _added_since_horizon(survey: Survey, unnamed: Iterable[str]) -> frozenset[str]:
    """Return the files among ``unnamed`` that a commit after the horizon added; read the newest commits first."""
    log = Log(survey.objects)
    left, needed = set(unnamed), set[str]()
    for number in range(survey.newest.version, survey.horizon.version, -1):
        if not left:
            break
        version = TableVersion(number)
        data = log.read(version)
        if data is None:
            # Another process cleaned the log, so the commit's files are unknown; keeping files costs only space.
            return frozenset(unnamed)
        added = {action.path for action in decode(data, commit_path(version)) if isinstance(action, Add)}
        needed |= added & left
        left -= added
    return frozenset(needed)


def collect_log(
    survey: Survey,
    clock: Clock,
    seen: TableVersion | None,
    *,
    dry_run: bool,
    at_once: bool = False,
    keeps_successors: bool = False,
    announce: Callable[[TableVersion], object] | None = None,
) -> Collection:
    """Delete commit files and checkpoints behind a checkpoint that the horizon has passed.

    The checkpoint's own commit file stays, and with it the digest that the next commit is chained to and that the
    high-water mark is compared with. ``seen`` is the newest version as the caller saw it `KEPT_MS` ago, by a monotonic
    clock; ``None`` if the caller has not run for that long and relies on the commits' own times. ``at_once`` writes a
    checkpoint where one is lacking, instead of leaving the commits for a later round. ``keeps_successors`` is for tables
    whose writers rely on it (`LogWriter.successors_kept`). ``announce`` tells the lease service the boundary before the
    first deletion; ``None`` if the table has none, or the caller has announced ``seen``.
    """
    limit = _log_limit(survey, clock, seen, dry_run=dry_run, at_once=at_once)
    matches = ((path, _OF_VERSION.match(path)) for path in sorted(survey.log_files))
    old = [(path, number) for path, match in matches if match and (number := int(match[1])) < limit]
    kept = {int(savepoint.version) for savepoint in survey.savepoints}
    if keeps_successors:
        kept |= _last_commits(survey, sorted({number for _, number in old}))
    # Oldest first, so that a collection that is killed leaves a shorter log without a hole.
    paths = tuple(path for path, number in old if number not in kept)
    if paths and not dry_run:
        _write_checkpoints_of_savepoints(survey, limit)
        # Before the first deletion: a writer that puts a commit into a freed version finds the boundary after its
        # put, and does not count the commit.
        if announce is not None:
            announce(limit)
        publish_log_boundary(survey.objects, limit)
        delete_files(survey.objects, paths)
    return Collection(kind="log", paths=paths)


def _last_commits(survey: Survey, versions: Sequence[int]) -> set[int]:
    """Return the versions, and those after them, at which transactions stand that have not moved since.

    A writer that sleeps since its last commit takes the version after it next. As long as that version is taken the put
    fails, and the writer learns of the commits that it missed. The commit itself stays for the next collection to find.
    """
    settled = {} if survey.settled is None else survey.settled.txns
    now = survey.newest.txns
    # Checkpoints of other engines may leave out old transactions.
    standing = {
        app_id: txn.version for app_id, txn in settled.items() if now.get(app_id, txn).version == txn.version
    }
    kept: set[int] = set()
    for begin in range(0, len(versions) if standing else 0, AHEAD_MAX):
        some = versions[begin : begin + AHEAD_MAX]
        ahead = Log(survey.objects).ahead(some)
        commits = (read_commit(ahead, TableVersion(version)) for version in some)
        for commit in commits:
            if commit is not None and commit.txns.items() & standing.items():
                kept |= {commit.version, commit.version + 1}
    return kept


def _write_checkpoints_of_savepoints(survey: Survey, limit: TableVersion) -> None:
    # Without the commits before it, a savepoint's version can only be read from its own checkpoint.
    log = Log(survey.objects)
    there = {checkpoint.version for checkpoint in log.inventory().checkpoints}
    for version in sorted({savepoint.version for savepoint in survey.savepoints} - there):
        if version < limit:
            write_checkpoint_at(log, version)


def _log_limit(
    survey: Survey, clock: Clock, seen: TableVersion | None, *, dry_run: bool, at_once: bool
) -> TableVersion:
    if survey.settled is None:
        return TableVersion(0)
    log = Log(survey.objects)
    # The boundary protects writers whatever clocks say. Sparing young commits only keeps live writers from being
    # refused, and readers that are opening the table from starting over.
    young = version_at(log, survey.newest.version, clock.now_us() // 1_000 - KEPT_MS)
    last = min(survey.settled.version, young, young if seen is None else seen)
    versions = [checkpoint.version for checkpoint in log.inventory().checkpoints]
    limit = max((version for version in versions if version <= last), default=TableVersion(0))
    if not at_once or limit == last:
        return limit
    if not dry_run:
        if not write_checkpoint_at(log, last):
            return limit
        # The log will rest on this checkpoint, so a power cut must not revert it.
        survey.objects.sync((checkpoint_path(last),))
    return last


def write_checkpoint(objects: Objects, *, every: int) -> TableVersion | None:
    log = Log(objects)
    inventory = log.inventory()
    last = max((checkpoint.version for checkpoint in inventory.checkpoints), default=TableVersion(0))
    if inventory.latest is None or inventory.latest - last < every:
        return None
    replayed = replay_log(log, inventory.latest)
    return replayed.version if write_checkpoint_of(objects, replayed, names_newest=True) else None


_NAMED_EVERY: Final = 32
_LOCK: Final = threading.Lock()
_LAST: Final[dict[str, ReplayedLog]] = {}
"""The table whose checkpoint this process wrote last, so that it reads no commit again."""


def forget_checkpoint(objects: Objects) -> None:
    """Let the next checkpoint read the log: since the last run here, the store may have become another, as by a restore."""
    with _LOCK:
        _LAST.pop(objects.url, None)


def extend_checkpoint(objects: Objects, commits: Sequence[tuple[TableVersion, bytes]]) -> int:
    """Write the checkpoint of the last of these consecutive commits, which the caller has just made or read.

    Return the number of its files, removed files and transactions.
    """
    (first, _), (last, _) = commits[0], commits[-1]
    with _LOCK:
        replayed = _LAST.pop(objects.url, None)
        if replayed is None or not first - 1 <= replayed.version <= last:
            replayed = replay_log(Log(objects), last)
        for version, data in commits:
            if version > replayed.version:
                replayed.apply(version, replayed.snapshot.apply(version, data, is_past=True))
        # Readers find newer checkpoints behind the one that is named, so naming each one is a request for nothing.
        is_named = (first - 1) // _NAMED_EVERY < last // _NAMED_EVERY
        write_checkpoint_of(objects, replayed, names_newest=is_named, on_disk=replayed.removes)
        _LAST.clear()
        _LAST[objects.url] = replayed
    return len(replayed.adds) + len(replayed.removes) + len(replayed.txns)


def _forget_deleted(survey: Survey, collections: Iterable[Collection]) -> None:
    """Let the next checkpoint of this process leave out removed files that are no longer there."""
    deleted = {path for collection in collections if collection.kind == "vacuum" for path in collection.paths}
    with _LOCK:
        if _LAST.pop(survey.objects.url, None) is None or survey.settled is None:
            return
        removes = survey.newest.removes
        # Only removals from before the listing: a file that came after it is missing there.
        for path, remove in survey.settled.removes.items():
            if (path in deleted or path not in survey.data_files) and removes.get(path) == remove:
                del removes[path]
        _LAST[survey.objects.url] = survey.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The bounds of a round.

    A replaced version stays readable for ``keep_ms``, or longer for open savepoints and readers' pins. A checkpoint is written
    ``checkpoint_every`` versions after the last one.
    """

    keep_ms: int = 3_600_000
    checkpoint_every: int = 1_024

    def __post_init__(self) -> None:
        if self.keep_ms < 0 or self.checkpoint_every < 1:
            raise InvalidError(
                "a retention's bounds are too small: keep_ms is at least 0, checkpoint_every at least 1",
                retention=self,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRound:
    """The result of a round: its horizon, the reason that holds the horizon back, and each collector's result."""

    horizon: TableVersion
    held_by: str
    collections: tuple[Collection, ...]


def collect_garbage(
    objects: Objects,
    catalog: Catalog | None,
    clock: Clock,
    *,
    retention: Retention,
    owned: Mapping[Interval, Owned],
    seen: TableVersion | None = None,
    announce: Callable[[TableVersion], object] | None,
    check: Callable[[], None] | None = None,
    dry_run: bool = False,
    at_once: bool = False,
) -> CollectionRound:
    """Run one round over all garbage except the rows that compaction drops.

    ``owned`` are the intervals whose leases the caller holds, and ``seen`` the newest version as the caller
    saw it a while ago, and ``announce`` tells the boundary (see `collect_log`). ``check`` raises if the caller may no longer delete; it is called
    before each collector. ``at_once`` writes further checkpoints where older garbage would otherwise wait for
    the next round.
    """
    # The checkpoint comes first, because it marks the settled part of the log.
    checkpoint = None if dry_run else write_checkpoint(objects, every=retention.checkpoint_every)
    horizons = Horizons(Log(objects), catalog, clock, retention.keep_ms)
    surveyed = survey(objects, horizons, dry_run=dry_run, at_once=at_once)
    if not dry_run:
        # Files are garbage only because of these commits and checkpoints; a power cut must not revert them.
        objects.sync(surveyed.rests_on)
    reach("garbage.surveyed")
    collections: list[Collection] = []
    for collect in (
        # Vacuum comes before the log cleanup, which deletes the record of removed files.
        partial(collect_removed, surveyed),
        partial(collect_orphans, surveyed, owned),
        partial(collect_log, surveyed, clock, seen, at_once=at_once, announce=announce),
    ):
        if check is not None:
            check()
        collections.append(collect(dry_run=dry_run))
    if not dry_run:
        _forget_deleted(surveyed, collections)
    if checkpoint is not None:
        collections.insert(0, Collection(kind="checkpoint", made=(checkpoint_path(checkpoint),)))
    return CollectionRound(
        horizon=surveyed.horizon.version, held_by=surveyed.horizon.held_by, collections=tuple(collections)
    )


def collect_garbage_at(
    objects: Objects,
    catalog_url: str | None,
    store_id: str,
    *,
    retention: Retention,
    owned: Mapping[Interval, Owned],
    seen: TableVersion,
) -> CollectionRound:
    """Run `collect_garbage` in a helper process, which opens the catalog itself; the caller has announced ``seen``."""
    clock = SystemClock()
    opened = nullcontext() if catalog_url is None else Catalog.open(catalog_url, clock, store_id=store_id)
    with opened as catalog:
        return collect_garbage(
            objects, catalog, clock, retention=retention, owned=owned, seen=seen, announce=None
        )
