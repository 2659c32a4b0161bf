"""The auditor: checks each table version the moment it lands, independently of the engine.

It reads commit files and row files as plain JSON and plain Parquet, not through the engine, and
keeps what it has read. It checks what holds for every workload: the chain of commits, the fences
(I4), one chain of versions per key (I5), watermarks, positions and supersteps that never fall
(I7, I2), and compactions that change nothing a reader sees (I10). Workloads check the rest.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from millpond.executor.pipeline.topology import Topology
from millpond.statestore.interval import Interval
from millpond.statestore.log.log import Log
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.rows.row_format import decode_rows, file_name_of
from millpond.statestore.types import TableVersion
from millpond.testing.simulation.versions.bookmark import Audited
from millpond.testing.simulation.violation import Violation, must
from millpond.testing.simulation.workload import RowVersion, Workload
from millpond.testing.simulation.world import ROWS, World

_COMMIT: Final = re.compile(r"^_delta_log/(\d{20})\.json$")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_SUPERSTEP: Final = "millpond/superstep/"
_SAVEPOINT: Final = "millpond/savepoint/"
_SINK_REACHED: Final = "millpond/sink_reached/"
_RESTORED: Final = "millpond/restored"
_TIMES: Final = ("millpond/watermark/", "millpond/last_event/")
_LONG_AGO: Final = -(2**63)
_COUNTED: Final = ("millpond/total/", "millpond/count/", "millpond/input_rows/", "millpond/injected/")
_SAID_SINCE: Final = (
    "millpond/codec/",
    "millpond/state_columns/",
    "millpond/state_version/",
    "millpond/fingerprint/",
    "millpond/backfill/",
)
_OF_A_FORK: Final = ("millpond/incarnation/", "millpond/fork/", "millpond/location/")
_VERSION_OF: Final = {"rewind": "restored_version", "fork": "forked_version"}
_DROPPED: Final = 2**63 - 1


class Auditor:
    """Follows the store's table commit by commit.

    Args:
        world: holds the disk.
        workload: adds further checks.
        topology: knows how states are encoded.

    Attributes:
        version: the newest table version.
        rows: the newest version of each row, by computation and key.
        fences: the packed fence of each interval.
        landed_us: when each table version landed, in the world's time.
        in_flight: productions that no consumer has consumed yet.
        audited: called with each version that has been audited, and its kind: of a rewind with the version that is back.
        undone: of each rewind, the first and the last superstep that it has undone.
        gone: of each rewind, the versions that it has undone.
        remembered: the audit's record of a version that the store may return to; raises `KeyError` for another one.
    """

    def __init__(self, world: World, workload: Workload, topology: Topology) -> None:
        self.version: int = -1
        self.rows: dict[str, dict[str, RowVersion]] = {}
        self.fences: dict[Interval, int] = {}
        self.landed_us: dict[int, int] = {}
        self.kinds: dict[str, int] = {}
        self.in_flight: list[tuple[str, str, Any, int]] = []
        self.live: set[str] = set()
        self._world = world
        self._workload = workload
        self._topology = topology
        self._positions: dict[str, int] = {}
        self._watermarks: dict[str, int] = {}
        self._cover: set[Interval] = set()
        self._digest = ""
        self._first = 0
        self._known: dict[tuple[str, str], set[tuple[int, int]]] = {}
        self.undone: list[tuple[int, int]] = []
        self.gone: list[range] = []
        self.audited: Callable[[int, str], None] = _nothing
        self.remembered: Callable[[int], Audited] = _nothing_remembered

    def at_present(self) -> Audited:
        """All that is known of the newest version."""
        return Audited(
            version=self.version,
            rows={computation: dict(rows) for computation, rows in self.rows.items()},
            in_flight=tuple(self.in_flight),
            live=frozenset(self.live),
            fences=dict(self.fences),
            cover=frozenset(self._cover),
            positions=dict(self._positions),
            watermarks=dict(self._watermarks),
            known={row: frozenset(numbers) for row, numbers in self._known.items()},
        )

    def begin_with(self, audited: Audited) -> None:
        """Be the auditor of a fork: know the facts of the version that it begins with."""
        self.version, self._first = audited.version, audited.version + 1
        self._take(audited)
        self.fences, self._cover, self.live = dict(audited.fences), set(audited.cover), set(audited.live)
        self._positions = dict(audited.positions)
        self._known = {row: set(numbers) for row, numbers in audited.known.items()}

    def _take(self, audited: Audited) -> None:
        self.rows = {computation: dict(rows) for computation, rows in audited.rows.items()}
        self.in_flight = list(audited.in_flight)
        self._watermarks = dict(audited.watermarks)

    def landed(self, disk: str, path: str) -> None:
        """An object has been created; audit it if it is a commit file."""
        match = _COMMIT.match(path)
        if disk != ROWS or match is None:
            return
        version = int(match[1])
        if version <= self.version:
            # The log is already truncated beyond this version: the file is no commit, and its writer notices.
            self._world.tell("auditor", f"version {version} lands behind version {self.version}")
            return
        try:
            if any(self._world.swarm.knows(kind) for kind in ("crash_in_write", "power_cut")):
                self._catch_up(version)
            must(
                version == self.version + 1,
                "I4",
                "versions rise by one",
                version=version,
                before=self.version,
            )
            self._audit(version, self._world.disk(ROWS).get(path))
        except Violation as violation:
            self._world.break_promise(violation)

    def _catch_up(self, version: int) -> None:
        """Audit the commits whose writers died before they learned that they had landed."""
        for missed in range(self.version + 1, version):
            data = Log(self._world.disk(ROWS)).read(TableVersion(missed))
            if data is None:
                return
            self._world.tell("auditor", f"version {missed} had landed")
            self._audit(missed, data)

    def oldest_readable(self, retention_ms: float) -> int:
        """The oldest version that a reader may still use: the newest one at the start of the retention."""
        before_us = self._world.now_us - int(retention_ms * 1_000)
        settled = [version for version, at_us in self.landed_us.items() if at_us <= before_us]
        return max(settled, default=self._first)

    def _audit(self, version: int, data: bytes) -> None:
        actions = [orjson.loads(line) for line in data.splitlines()]
        info: dict[str, Any] = next(
            (action["commitInfo"] for action in actions if "commitInfo" in action), {}
        )
        told = info.get("millpond") or {}
        kind = told.get("kind", "other")
        self._check_chain(told, data)
        self.version = version
        self.landed_us[version] = self._world.now_us
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        txns = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
        if kind in _VERSION_OF:
            self._audit_return(version, kind, told, actions, txns)
            self._world.tell("auditor", f"version {version} {kind}")
            self.audited(version, f"{kind} {told[_VERSION_OF[kind]]}")
            return
        fences = self._check_fences(txns, told.get("replaced", ()))
        self._check_positions(txns, kind)
        self._check_watermarks(told.get("watermarks", {}))
        produced = []
        for action in actions:
            if "remove" in action:
                self.live.discard(action["remove"]["path"])
            if "add" in action:
                produced += self._check_file(action["add"], kind, fences, version)
        if kind == "superstep":
            self.in_flight = produced
            self._workload.check_version(version, produced)
        self._world.tell("auditor", f"version {version} {kind} {len(produced)}")
        self.audited(version, kind)

    def _check_chain(self, told: Mapping[str, Any], data: bytes) -> None:
        if self._digest:
            must(told.get("previous") == self._digest, "I11", "a commit follows the one before it")
        self._digest = hashlib.sha256(data).hexdigest()

    def _check_fences(self, txns: Mapping[str, int], replaced: Collection[str]) -> dict[Interval, int]:
        owners = {}
        for app_id, version in txns.items():
            interval = Interval.from_app_id(app_id)
            if interval is None:
                continue
            before = self.fences.get(interval)
            takes_over = version & 0xFFFFFFFF == 0 and (before is None or version >> 32 > before >> 32)
            must(
                takes_over or (before is not None and version == before + 1),
                "I4",
                "an interval's fence follows the one before it",
                interval=app_id,
                before=_fence(before),
                after=_fence(version),
            )
            self.fences[interval] = owners[interval] = version
        self._check_cover(owners, replaced)
        return owners

    def _check_cover(self, owners: Mapping[Interval, int], replaced: Collection[str]) -> None:
        """Each key of a computation lies in one interval: commits say which ones they replace, and touch no others."""
        for interval, version in owners.items():
            if interval.app_id in replaced:
                must(interval in self._cover, "I4", "what is replaced was there", interval=interval.app_id)
            elif version & 0xFFFFFFFF:
                must(
                    interval in self._cover, "I4", "only live intervals are written", interval=interval.app_id
                )
        self._cover -= {interval for interval in owners if interval.app_id in replaced}
        self._cover |= {interval for interval in owners if interval.app_id not in replaced}
        touched = {interval.computation for interval in owners} & self._topology.computations.keys()
        for computation in touched:
            cover = [interval for interval in self._cover if interval.computation == computation]
            cover.sort(key=lambda interval: interval.low)
            bounds = ["", *(interval.high for interval in cover)]
            must(
                [interval.low for interval in cover] == bounds[:-1] and bounds[-1] is None,
                "I4",
                "the intervals of a computation share no keys and leave none out",
                intervals=[interval.app_id for interval in cover],
            )

    def _check_positions(self, txns: Mapping[str, int], kind: str) -> None:
        for app_id, version in txns.items():
            if Interval.from_app_id(app_id) is not None:
                continue
            before = self._positions.get(app_id)
            is_free = before == _DROPPED and app_id.startswith(_SAVEPOINT)
            must(
                before is None or version >= before or is_free,
                "I2",
                "a position never falls",
                app_id=app_id,
                before=before,
                after=version,
            )
            if app_id.startswith(_SUPERSTEP):
                must(
                    version == (before or 0) + 1, "I2", "supersteps rise by one", before=before, after=version
                )
                must(kind == "superstep", "I2", "only supersteps count as supersteps", kind=kind)
            self._positions[app_id] = version

    def _check_watermarks(self, marks: Mapping[str, int]) -> None:
        for app_id, mark in marks.items():
            before = self._watermarks.get(app_id)
            must(before is None or mark >= before, "I7", "a watermark never falls", before=before, after=mark)
            self._watermarks[app_id] = mark

    # -- an older version comes back -------------------------------------------------------

    def _audit_return(
        self,
        version: int,
        kind: str,
        told: Mapping[str, Any],
        actions: Collection[Mapping[str, Any]],
        txns: Mapping[str, int],
    ) -> None:
        """A rewind or a fork: everything equals its version, except fences and supersteps, which rise."""
        back = self.remembered(told[_VERSION_OF[kind]])
        before = self._positions
        after = before | {app_id: at for app_id, at in txns.items() if Interval.from_app_id(app_id) is None}
        expected = {app_id: at for app_id, at in before.items() if app_id not in back.positions}
        expected |= {app_id: 0 for app_id in expected if app_id.startswith(_COUNTED)}
        expected |= {app_id: -1 for app_id in expected if app_id.startswith(_SAID_SINCE)}
        expected |= {app_id: _LONG_AGO for app_id in expected if app_id.startswith(_TIMES)}
        expected |= back.positions
        is_undone = kind == "rewind" and back.version < version - 1
        if is_undone:
            # Sinks may be taken back to before what they had then.
            expected |= {app_id: 0 for app_id in after if app_id.startswith(_SINK_REACHED)}
        for app_id, at in after.items():
            if app_id == _RESTORED:
                must(at == version, "I2", "processes are told that older files are back", restored=at)
            elif app_id.startswith(_SUPERSTEP) and is_undone:
                must(at > before[app_id], "I2", "supersteps rise over a rewind", before=before[app_id], at=at)
            elif app_id.startswith(_SAVEPOINT):
                kept = before.get(app_id) if kind == "rewind" else _DROPPED
                must(at == kept, "I10", f"a {kind} leaves a store its own savepoints", app_id=app_id, at=at)
            elif not (app_id.startswith(_OF_A_FORK) and kind == "fork"):
                must(
                    at == expected.get(app_id),
                    "I2",
                    "a position is where it was at the version that comes back",
                    app_id=app_id,
                    was=expected.get(app_id),
                    at=at,
                )
        marks = told.get("watermarks", {})
        for app_id, mark in back.watermarks.items():
            must(marks.get(app_id, mark) == mark, "I7", "a watermark is where it was", app_id=app_id)
        if kind == "rewind":
            taken = {owned.app_id: txns[owned.app_id] for owned in self._cover if owned.app_id in txns}
            must(len(taken) == len(self._cover), "I4", "a rewind fences every owner", taken=sorted(taken))
            self._check_fences(taken, ())
        if is_undone:
            self.gone.append(range(back.version + 1, version))
            self.undone.append((_superstep(back.positions), _superstep(before)))
        self._positions = after
        self._take(back)
        self._check_files_of_return(back, actions, after, is_whole=kind == "fork", is_undone=is_undone)

    def _check_files_of_return(
        self,
        back: Audited,
        actions: Collection[Mapping[str, Any]],
        positions: Mapping[str, int],
        *,
        is_whole: bool,
        is_undone: bool,
    ) -> None:
        superstep = _superstep(positions)
        removed = {action["remove"]["path"] for action in actions if "remove" in action}
        added = [action["add"] for action in actions if "add" in action]
        live = (set() if is_whole else self.live - removed) | {add["path"] for add in added}
        must(len(live) == len(back.live), "I11", "as many files are live as were then", files=len(live))
        undelivered: Counter[str] = Counter()
        for add in added:
            computation = add["partitionValues"]["computation"]
            for key, update in self._read(add["path"], computation, self.version):
                self._check_compacted(computation, key, self.rows.get(computation, {}).get(key), update)
                if update.row.superstep == superstep:
                    undelivered.update(map(repr, update.row.productions))
        self.live = live
        if is_undone or is_whole:
            wanted = Counter(map(repr, self.in_flight))
            must(undelivered == wanted, "I1", "what was undelivered then is undelivered again")

    # -- rows ------------------------------------------------------------------------------

    def _check_file(
        self, add: Mapping[str, Any], kind: str, fences: Mapping[Interval, int], version: int
    ) -> list[tuple[str, str, Any, int]]:
        self.live.add(add["path"])
        computation = add["partitionValues"]["computation"]
        produced: list[tuple[str, str, Any, int]] = []
        for key, update in self._read(add["path"], computation, version):
            before = self.rows.setdefault(computation, {}).get(key)
            if kind == "superstep":
                after = self._check_update(computation, key, before, update, fences)
                self.rows[computation][key] = after
                produced += after.productions
            else:
                self._check_compacted(computation, key, before, update)
        return produced

    def _check_update(
        self,
        computation: str,
        key: str,
        before: RowVersion | None,
        update: _Update,
        fences: Mapping[Interval, int],
    ) -> RowVersion:
        row = update.row
        fence = (row.sequencer << 32) + row.commit_number
        owner = next(
            (at for owned, at in fences.items() if owned.computation == computation and owned.contains(key)),
            None,
        )
        must(
            fence == owner, "I4", "a row carries its commit's fence", row=_fence(fence), commit=_fence(owner)
        )
        if before is not None:
            newer = (row.sequencer, row.commit_number) > (before.sequencer, before.commit_number)
            must(newer and row.superstep > before.superstep, "I5", "a key's versions are a chain", key=key)
        after = update.after(before)
        self._known.setdefault((computation, key), set()).add((row.sequencer, row.commit_number))
        self._workload.check_row(computation, key, before, after)
        return after

    def _check_compacted(
        self, computation: str, key: str, newest: RowVersion | None, update: _Update
    ) -> None:
        row = update.row
        number = (row.sequencer, row.commit_number)
        known = self._known.get((computation, key), set())
        must(number in known, "I10", "a compaction keeps a row's place in time", key=key, at=number)
        if newest is not None and number == (newest.sequencer, newest.commit_number) and update.has_state:
            must(
                row.state == newest.state,
                "I10",
                "a compaction changes no state",
                key=key,
                computation=computation,
            )

    def _read(self, path: str, computation: str, version: int) -> Iterator[tuple[str, _Update]]:
        node = self._topology.computations.get(computation)
        data = self._world.disk(ROWS).get(path)
        table = decode_rows(data, ROW_SCHEMA.names, None, name=file_name_of(path))
        for row in table.to_pylist():
            encoded = row["state"] if row["state"] is not None else row["state_bytes"]
            cells = _filled(row, "state_")
            has_state = encoded is not None or cells is not None or bool(row["deleted"])
            state = cells
            if encoded is not None:
                state = orjson.loads(encoded) if node is None else node.computation.codec.decode(encoded)
            timers = row["timers"]
            yield (
                row["key"],
                _Update(
                    RowVersion(
                        sequencer=row["sequencer"],
                        commit_number=row["commit_number"],
                        superstep=row["superstep"],
                        state=state,
                        timers=tuple(sorted((t["tag"], t["domain"], _micros(t["at"])) for t in timers or ())),
                        record_ids=tuple(entry["id"] for entry in row["record_ids"] or ()),
                        productions=tuple(
                            (p["stream"], p["key"], _value(p), _micros(p["at"]))
                            for p in row["productions"] or ()
                        ),
                        table_version=version,
                    ),
                    has_state=has_state,
                    has_timers=timers is not None,
                    added=_filled(row, "addend_"),
                ),
            )


class _Update:
    """A row update as a file holds it; fields that it leaves open keep their value."""

    __slots__ = ("added", "has_state", "has_timers", "row")

    def __init__(
        self, row: RowVersion, *, has_state: bool, has_timers: bool, added: Mapping[str, int | None] | None
    ) -> None:
        self.row = row
        self.added = added
        self.has_state = has_state
        self.has_timers = has_timers

    def after(self, before: RowVersion | None) -> RowVersion:
        row = self.row
        state = row.state if self.has_state or before is None else before.state
        if self.added is not None:
            state = dict(state or dict.fromkeys(self.added))
            for name, number in self.added.items():
                state[name] = number if state[name] is None else state[name] + (number or 0)
        timers = row.timers if self.has_timers or before is None else before.timers
        if state is row.state and timers is row.timers:
            return row
        return RowVersion(
            row.sequencer,
            row.commit_number,
            row.superstep,
            state,
            timers,
            row.record_ids,
            row.productions,
            row.table_version,
        )


def _filled(row: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    """The cells of a row in whichever column of a schema has some."""
    return next(
        (cells for name, cells in row.items() if _has_schema(name, prefix) and cells is not None), None
    )


def _has_schema(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name not in ROW_SCHEMA.names


def _superstep(positions: Mapping[str, int]) -> int:
    return max((at for app_id, at in positions.items() if app_id.startswith(_SUPERSTEP)), default=0)


def _fence(packed: int | None) -> str:
    return "none" if packed is None else f"{packed >> 32}/{packed & 0xFFFFFFFF}"


def _micros(at: Any) -> int:
    return int((at - _EPOCH) // _MICROSECOND)


def _value(production: Mapping[str, Any]) -> Any:
    text = production["value"]
    return production["value_bytes"] if text is None else orjson.loads(text)


def _nothing(_version: int, _kind: str) -> None:
    return


def _nothing_remembered(version: int) -> Audited:
    raise KeyError(version)
