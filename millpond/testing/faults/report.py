"""The results of a run with faults, counted where they happen.

A `FaultReport` is passed to the code that injects faults and to the code that checks the results. It
adds up, and becomes JSON (``build/fault/report.json`` of a test run, a part of ``build/soak/report.json``)
and a table. `GOALS` names the classes of faults, by the rows of the design's goal table, with the
number of trials that a test run makes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Goal:
    """One class of faults: a description, and the number of trials a test run owes."""

    fault: str
    trials: int


GOALS: Final[Mapping[str, Goal]] = {
    "R1": Goal("process killed at a random instant", 200),
    "R2": Goal("process ended at a named failpoint", 20),
    "R3": Goal("reply of a commit lost, landed", 50),
    "R4": Goal("reply lost, not landed; 5xx, 429, reset, slow, cut body", 8),
    "R5": Goal("put that fails and lands later", 50),
    "R6": Goal("process stopped past its session, then resumed", 20),
    "R7": Goal("owners by force: orders of their calls to what they share", 1_000),
    "R8": Goal("ZooKeeper session expired, connection lost, outcome unknown", 50),
    "R9": Goal("ZooKeeper leader killed, follower killed, quorum lost", 10),
    "R10": Goal("process cut off from ZooKeeper or from the store", 10),
    "R14": Goal("disk full at some write, and freed later", 10),
    "R15": Goal("one bit flipped", 1_000),
    "R16": Goal("file truncated, zeroed, emptied, deleted, rolled back, swapped", 150),
    "R18": Goal("power cut: what the file system had not written is gone", 20),
    "R19": Goal("Spark executor, worker or driver killed", 3),
    "R23": Goal("hot key, million keys, row of 64 MiB, change of hands under load", 4),
}
"""Classes of faults by their row in the goal table."""

_COUNTS: Final[Mapping[str, str]] = {
    "kills": "processes killed",
    "takeovers": "take-overs",
    "zombies": "former owners that went on",
    "zombies_fenced": "… of them answered FencedError",
    "zombie_commits_accepted": "… of whose commits were accepted",
    "lost_replies": "replies of commits lost",
    "lost_replies_settled": "… settled by reading back",
    "flips": "bits flipped",
    "cuts": "files cut, replaced or removed",
    "silent_wrong_reads": "silent wrong reads after a flip or a cut",
    "silent_older_reads": "silent older reads after a flip or a cut",
    "records_checked": "records held against the history",
}
"""Further counts by name, each with its label in the table."""


class FaultReport:
    """Counts of faults and of their outcomes; safe to use from any thread.

    Example:
        >>> report = FaultReport()
        >>> report.fault("R1", kills=1)
        >>> report.to_json()["kills"]
        1
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._violations: list[str] = []
        self._recovered_ms: dict[str, list[float]] = {}

    def fault(self, row: str, trials: int = 1, **counts: int) -> None:
        """Count faults of one class.

        Args:
            row: its row in `GOALS`.
            trials: number of faults.
            counts: further counts, as in `count`.
        """
        if row not in GOALS:
            raise KeyError(row)
        with self._lock:
            self._faults[row] += trials
        self.count(**counts)

    def count(self, **counts: int) -> None:
        """Add to counts by name."""
        unknown = sorted(set(counts) - set(_COUNTS))
        if unknown:
            raise KeyError(unknown[0])
        with self._lock:
            self._counts.update(counts)

    def violation(self, text: str) -> None:
        """Record a broken promise."""
        with self._lock:
            self._violations.append(text)

    def recovered(self, row: str, duration_ms: float) -> None:
        """Record the time from a fault of this class to the next acknowledged commit."""
        with self._lock:
            self._recovered_ms.setdefault(row, []).append(duration_ms)

    def add(self, other: FaultReport) -> None:
        """Add the counts of another report."""
        with self._lock:
            self._faults.update(other._faults)
            self._counts.update(other._counts)
            self._violations += other._violations
            for row, durations in other._recovered_ms.items():
                self._recovered_ms.setdefault(row, []).extend(durations)

    def __bool__(self) -> bool:
        """Return True if anything has been counted."""
        return bool(self._faults)

    @property
    def violations(self) -> Sequence[str]:
        """The broken promises."""
        return tuple(self._violations)

    def trials(self, row: str) -> int:
        """Number of faults of a class."""
        return self._faults[row]

    def number(self, name: str) -> int:
        """A count, by name."""
        return self._counts[name]

    def recovery_s(self, at: float, row: str | None = None) -> float | None:
        """A quantile of the recovery times of one class of faults, or of all, in seconds; ``None`` without any."""
        rows = self._recovered_ms if row is None else [row]
        durations = [duration for name in rows for duration in self._recovered_ms.get(name, ())]
        return round(quantile(durations, at) / 1_000, 3) if durations else None

    def to_json(self) -> dict[str, Any]:
        """The complete report, for a file."""
        return {
            "faults": {
                row: {"fault": goal.fault, "trials": self._faults[row], "goal": goal.trials}
                for row, goal in GOALS.items()
                if self._faults[row]
            },
            **{name: self._counts[name] for name in _COUNTS},
            "violations": list(self._violations),
            "recovery_p50_s": self.recovery_s(0.5),
            "recovery_p99_s": self.recovery_s(0.99),
            "takeover_p50_s": self.recovery_s(0.5, "R6"),
            "takeover_p99_s": self.recovery_s(0.99, "R6"),
            "recovered_ms": {
                row: [round(duration, 1) for duration in durations]
                for row, durations in self._recovered_ms.items()
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FaultReport:
        """A report from its JSON, to be continued."""
        report = cls()
        report._faults.update({row: value["trials"] for row, value in fields["faults"].items()})
        report._counts.update({name: fields.get(name, 0) for name in _COUNTS})
        report._violations += fields["violations"]
        report._recovered_ms.update({row: list(value) for row, value in fields["recovered_ms"].items()})
        return report

    def lines(self) -> list[str]:
        """A table for people."""
        rows: list[Row] = [
            (row, goal.fault, f"{self._faults[row]:,} of {goal.trials:,}")
            for row, goal in GOALS.items()
            if self._faults[row]
        ]
        rows += [("", text, f"{self._counts[name]:,}") for name, text in _COUNTS.items()]
        for row in sorted(self._recovered_ms):
            times = " / ".join(f"{self.recovery_s(at, row):.2f}" for at in (0.5, 0.99))
            rows.append((row, "seconds to the next commit, p50 / p99", times))
        rows.append(("", "violations", f"{len(self._violations):,}"))
        width = max(len(text) for _, text, _ in rows)
        return [f"{row:4}{text:{width}}  {figure:>16}" for row, text, figure in rows]


def quantile(values: Sequence[float], at: float) -> float:
    """The smallest of the values that at least this share of them do not exceed.

    Example:
        >>> quantile([3.0, 1.0, 2.0], 0.5)
        2.0
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]
