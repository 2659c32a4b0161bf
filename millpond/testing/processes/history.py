"""The history of a run by real processes, and a check of the store against it.

Each process appends a line to its own file before and after every relevant step:
`HistoryFile.tell`. A line is written whole or not at all, even if the process is killed, and carries
the machine's monotonic clock, which all processes share. Records have unique numbers that the
ledger appends to its keys' lists (`millpond.testing.processes.ledger`), so `check_history` sees in linear
time which records were lost, repeated, reordered or forked.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from millpond.statestore.history.verification import verify_store
from millpond.statestore.log.action import CommitInfo
from millpond.statestore.log.commit_file import decode
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import commit_path
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, TableVersion
from millpond.testing.processes.ledger import ledger_of

_SAMPLES: Final = 12

Event = Mapping[str, Any]
"""
A line: ``event``, ``at_us`` and ``process``, and what the event has of its own.

``invoke`` and ``ack`` have ``first`` and ``last`` of the record numbers; ``read`` has ``from_us`` and
``last``, the greatest number that was read.
"""


class HistoryFile:
    """One process's part of the history.

    Args:
        folder: the folder of the whole history.
        process: the process's name, unique in the history.
        clock: the monotonic clock that all processes share.
    """

    def __init__(self, folder: Path, process: str, clock: Clock) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._process = process
        self._clock = clock
        self._file = os.open(folder / f"{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, event: str, **fields: Any) -> None:
        """Append a line with one write."""
        line = {"event": event, "at_us": self._clock.monotonic_us(), "process": self._process, **fields}
        os.write(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_history(folder: Path, process: str = "*") -> list[Event]:
    """The lines of all processes, or of one, ordered by time."""
    lines = [line for file in folder.glob(f"{process}.jsonl") for line in file.read_bytes().splitlines()]
    return sorted((orjson.loads(line) for line in lines), key=lambda event: int(event["at_us"]))


def last_acknowledged(folder: Path) -> int:
    """The greatest record number acknowledged to any process; -1 if there is none."""
    return max((event["last"] for event in read_history(folder) if event["event"] == "ack"), default=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of checking a store against a history.

    Attributes:
        records: number of records in the ledger.
        acknowledged: number of acknowledged records.
        takeovers: number of times a writer fenced the previous one.
        zombie_commits: commits of a writer after it was fenced.
        violations: broken promises, in words.
    """

    records: int
    acknowledged: int
    takeovers: int
    zombie_commits: int
    violations: tuple[str, ...]


def check_history(events: Sequence[Event], store: Store, mark: Mark | None) -> Checked:
    """Check a store against the history of the processes that wrote it.

    Args:
        events: the complete history.
        store: the store.
        mark: its high-water mark; ``None`` if it is not known.
    """
    ledger = ledger_of(store)
    numbers = sorted(number for value in ledger.values() for number in value)
    acknowledged = max((event["last"] for event in events if event["event"] == "ack"), default=-1)
    takeovers, zombie_commits = _writers(store)
    violations = [
        *_wrong_numbers(ledger, numbers, acknowledged, events),
        *_wrong_versions(store),
        *_stale_reads(events),
        *(f"{finding.path}: {finding.fault}" for finding in verify_store(store.objects, mark).findings),
    ]
    if zombie_commits:
        violations.append(f"{zombie_commits} commits of writers that had been fenced")
    return Checked(
        records=len(numbers),
        acknowledged=acknowledged + 1,
        takeovers=takeovers,
        zombie_commits=zombie_commits,
        violations=tuple(violations),
    )


def _wrong_numbers(
    ledger: Mapping[str, Sequence[int]], numbers: Sequence[int], acknowledged: int, events: Sequence[Event]
) -> Iterable[str]:
    there = set(numbers)
    lost = sorted(set(range(acknowledged + 1)) - there)
    if lost:
        yield f"{len(lost)} acknowledged records are lost, first {lost[0]}"
    if len(there) != len(numbers):
        twice = next(first for first, second in pairwise(numbers) if first == second)
        yield f"{len(numbers) - len(there)} records are there twice, first {twice}"
    invoked = {
        number
        for event in events
        if event["event"] == "invoke"
        for number in range(event["first"], event["last"] + 1)
    }
    if there - invoked:
        yield f"{len(there - invoked)} records came from nowhere, first {min(there - invoked)}"
    for key, appended in ledger.items():
        if list(appended) != sorted(appended):
            yield f"the records of key {key} are out of order"


def _wrong_versions(store: Store) -> Iterable[str]:
    """Each version of a key's list extends the earlier one; otherwise its history has forked."""
    newest = store.snapshot().version
    step = max(1, newest // _SAMPLES)
    before: Mapping[str, Sequence[int]] = {}
    for version in range(newest % step, newest + 1, step):
        ledger = ledger_of(store, version)
        for key, earlier in before.items():
            if list(ledger.get(key, ()))[: len(earlier)] != list(earlier):
                yield f"key {key} forked before version {version}"
        before = ledger


def _stale_reads(events: Sequence[Event]) -> Iterable[str]:
    """A read shows every record acknowledged before it began, and none injected after it ended."""
    acknowledged = -1
    acks = sorted((event["at_us"], event["last"]) for event in events if event["event"] == "ack")
    reads = sorted(
        (event for event in events if event["event"] == "read"), key=lambda event: event["from_us"]
    )
    index = 0
    for event in reads:
        while index < len(acks) and acks[index][0] < event["from_us"]:
            acknowledged = max(acknowledged, acks[index][1])
            index += 1
        if event["last"] < acknowledged:
            yield f"a read after record {acknowledged} was acknowledged ended with {event['last']}"


def _writers(store: Store) -> tuple[int, int]:
    """Number of changes of owner, and of commits by an owner that had been replaced."""
    fenced_by: dict[str, int] = defaultdict(int)
    owner, takeovers, zombie_commits = "", 0, 0
    for version in range(store.snapshot().version + 1):
        data = store.log.read(TableVersion(version))
        actions = decode(data, commit_path(version)) if data is not None else ()
        for info in (
            action.millpond for action in actions if isinstance(action, CommitInfo) and action.millpond
        ):
            writer, kind = str(info["writer"]), info.get("kind")
            if kind == "fence":
                takeovers += bool(owner) and writer != owner
                owner = writer
                fenced_by[writer] = version
            elif owner and writer != owner:
                zombie_commits += writer in fenced_by
    return takeovers, zombie_commits
