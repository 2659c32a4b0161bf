"""Faults on real processes: workers that are killed, stopped and cut off, and ensembles that lose members.

A scenario takes a `Ground` (a folder, a ZooKeeper ensemble, a nest of workers) and injects one kind
of fault a number of times; then a last worker finishes, and the store is checked against the
history of all workers (`settle`). Faults are counted in the ground's report; broken promises are
violations there. Tests run each scenario briefly, `millpond.testing.soak` for long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from millpond.statestore.failpoint import FAILPOINTS
from millpond.statestore.log.high_water import check_high_water
from millpond.statestore.store import Store
from millpond.statestore.types import Clock, Rng
from millpond.testing.faults.damage import DamageOutcome, file_kinds, flip, outcome_of
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.history import (
    Checked,
    Event,
    HistoryFile,
    check_history,
    last_acknowledged,
    read_history,
)
from millpond.testing.processes.ledger import ledger_of
from millpond.testing.processes.worker import Nest, Worker, WorkerOptions
from millpond.testing.servers.s3_proxy import S3Fault, S3Proxy
from millpond.testing.servers.zookeeper import Ensemble, wait_until

_LAST_RECORDS: Final = 10
_CALM_SESSION_MS: Final = 10_000
_RECORDS_TO_A_FAILPOINT: Final = 400
IN_A_LEDGER: Final = tuple(
    name
    for name in FAILPOINTS
    if not name.startswith(("sink.", "update."))
    and name
    not in {
        "commit.put_failed",
        "commit.version_taken",
        "commit.outcome_unknown",
        "delivery.read",
        "garbage.before_delete",
        "garbage.deleted",
    }
)
"""The failpoints that a worker reaches; others need a consumer, a sink, a failing store or old garbage."""


@dataclass(kw_only=True)
class Ground:
    """The environment of a scenario.

    Args:
        folder: for the store (unless ``url`` names it) and the history.
        ensemble: the ZooKeeper ensemble, running.
        nest: forks the workers.
        clock: the source of time.
        rng: chooses times and victims.
        report: counts faults and violations.
        url: the store's URL, if it is not in the folder.
        storage_options: for a store in an object store.
        options: further `WorkerOptions` of every worker.
        patience_ms: how long to wait for an event before its absence is a violation.
    """

    folder: Path
    ensemble: Ensemble
    nest: Nest
    clock: Clock
    rng: Rng
    report: FaultReport
    url: str = ""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    patience_ms: float = 120_000
    _hatched: int = 0

    @property
    def place(self) -> str:
        """The store's folder or URL."""
        return self.url or str(self.folder / "pond")

    @property
    def history(self) -> Path:
        """The folder of the history."""
        return self.folder / "history"

    def hatch(self, **options: object) -> Worker:
        """Fork a worker."""
        self._hatched += 1
        given: dict[str, object] = {
            "name": f"worker-{self._hatched:05d}",
            "path": self.place,
            "history": self.history,
            "hosts": self.ensemble.hosts,
            "storage_options": dict(self.storage_options),
            **self.options,
            **options,
        }
        return self.nest.hatch(WorkerOptions(**given))  # type: ignore[arg-type]

    def open(self, *, read_only: bool = False) -> Store:
        """Open the store."""
        return Store.open(
            self.place, self.ensemble.hosts, storage_options=self.storage_options, read_only=read_only
        )

    def events(self, worker: Worker | None = None) -> list[Event]:
        """The history so far, of all workers or of one."""
        return read_history(self.history, "*" if worker is None else worker.options.name)

    def wait_for(self, worker: Worker, event: str, *, after_us: int = 0) -> Event | None:
        """The first such event of a worker after a time; ``None`` if the worker ends, or times out, without one."""
        matches: list[Event] = []

        def has_come() -> bool:
            events = self.events(worker)
            matches[:] = [entry for entry in events if entry["event"] == event and entry["at_us"] > after_us]
            return bool(matches) or (not worker.is_alive and any(entry["event"] == "end" for entry in events))

        wait_until(has_come, self.clock, self.patience_ms)
        return matches[0] if matches else None

    def progresses(self, worker: Worker, fault_us: int | None = None, *, row: str = "R1") -> bool:
        """Wait until a worker gets an acknowledgement; records the recovery time of a fault, if one is named."""
        event = self.wait_for(worker, "ack", after_us=fault_us or 0)
        if event is None:
            self.report.violation(f"{worker.options.name} makes no progress")
        elif fault_us is not None:
            self.report.recovered(row, (event["at_us"] - fault_us) / 1_000)
        return event is not None

    def pause_ms(self, at_most: float) -> None:
        """Wait for a random time."""
        self.clock.sleep_ms(self.rng.random() * at_most)


def settle(ground: Ground) -> Checked:
    """Let a last worker finish, check the store against the history, and report the result."""
    ground.ensemble.start()
    last = ground.hatch(records=_LAST_RECORDS, session_timeout_ms=_CALM_SESSION_MS, fenced=True)
    if not last.join(ground.patience_ms):
        ground.report.violation("the last worker does not finish")
        last.kill()
    events = ground.events()
    if not any(event["event"] == "ack" for event in ground.events(last)):
        ground.report.violation(f"the last worker got nothing in: {ground.events(last)[-2:]}")
    with ground.open() as store:
        checked = check_history(events, store, store.leases.high_water.read())
    ground.report.count(
        takeovers=checked.takeovers,
        zombie_commits_accepted=checked.zombie_commits,
        records_checked=checked.records,
    )
    for text in checked.violations:
        ground.report.violation(text)
    return checked


def random_kills(ground: Ground, kills: int, *, within_ms: float = 120.0) -> None:
    """R1: workers are killed at random instants, half of them from their start on, half at work."""
    killed_us: int | None = None
    for number in range(kills):
        worker = ground.hatch(pace_ms=1.0)
        if number % 2:
            ground.wait_for(worker, "open")
        if number % 5 == 4:  # so that some workers get to work even on a slow machine
            ground.progresses(worker, killed_us)
        ground.pause_ms(within_ms)
        worker.kill()
        killed_us = ground.clock.monotonic_us()
        ground.report.fault("R1", kills=1)
        if number % 20 == 19:
            _look(ground)


def _look(ground: Ground) -> None:
    """Read the store while workers write."""
    told = HistoryFile(ground.history, "reader", ground.clock)
    from_us = ground.clock.monotonic_us()
    with ground.open(read_only=True) as store:
        numbers = [number for value in ledger_of(store).values() for number in value]
    told.tell("read", from_us=from_us, last=max(numbers, default=-1))
    told.close()


def exits_at_failpoints(ground: Ground, names: Sequence[str]) -> None:
    """R2: a worker ends at each of the failpoints, as if killed there."""
    for name in names:
        worker = ground.hatch(exit_at=name, records=_RECORDS_TO_A_FAILPOINT)
        worker.join(ground.patience_ms)
        if worker.exit_at_failpoint:
            ground.report.fault("R2", kills=1)
        else:
            ground.report.violation(f"no worker reached {name}")


def stopped_owners(ground: Ground, takeovers: int) -> None:
    """R6: the owner is stopped past its session, a standby takes over, and the former owner resumes.

    Every second owner is stopped between building a commit and its put.
    """
    owner = ground.hatch(pace_ms=2.0)
    ground.progresses(owner)
    for number in range(takeovers):
        standby = ground.hatch(on_held="wait", pace_ms=2.0)
        if number % 2:
            owner.stop_before_put()
            owner.wait_until_stopped(ground.clock, ground.patience_ms)
        else:
            ground.pause_ms(50.0)
            owner.stop()
        stopped_us = ground.clock.monotonic_us()
        followed = ground.progresses(standby, stopped_us, row="R6")
        owner.go_on()
        if not followed:
            standby.kill()
            continue
        ground.report.fault("R6", zombies=1)
        if ground.wait_for(owner, "fenced") is not None:
            ground.report.count(zombies_fenced=1)
        else:
            ground.report.violation(f"a former owner was not told: {ground.events(owner)[-1:]}")
        owner.kill()
        owner = standby
    owner.kill()


def lost_members(ground: Ground, kills: int) -> None:
    """R9: the leader and followers are killed in turn and come back, under a running worker."""
    worker = ground.hatch(pace_ms=5.0, session_timeout_ms=_CALM_SESSION_MS)
    ground.progresses(worker)
    for number in range(kills):
        leader = ground.ensemble.leader()
        victim = leader if leader is not None and number % 2 == 0 else (0 if leader != 0 else 1)
        ground.ensemble.kill(victim)
        killed_us = ground.clock.monotonic_us()
        ground.report.fault("R9")
        if not wait_until(ground.ensemble.has_quorum, ground.clock, ground.patience_ms):
            ground.report.violation("the ensemble has no leader any more")
        ground.progresses(worker, killed_us, row="R9")
        ground.ensemble.start()
    worker.kill()


def lost_quorum(ground: Ground, *, times: int, away_ms: float) -> None:
    """R9: two of three members are away for a while; nothing new starts, and running workers recover."""
    worker = ground.hatch(pace_ms=5.0, session_timeout_ms=4 * int(away_ms))
    ground.progresses(worker)
    for _ in range(times):
        ground.ensemble.kill(0)
        ground.ensemble.kill(1)
        ground.clock.sleep_ms(away_ms / 2)
        # A worker that has noticed the loss acknowledges nothing until the quorum is back.
        before = last_acknowledged(ground.history)
        ground.clock.sleep_ms(away_ms / 2)
        if last_acknowledged(ground.history) != before:
            ground.report.violation("records were acknowledged without a quorum")
        ground.ensemble.start()
        back_us = ground.clock.monotonic_us()
        ground.report.fault("R9")
        ground.progresses(worker, back_us, row="R9")
    worker.kill()


def stormy_store(ground: Ground, kills: int, proxy: S3Proxy) -> None:
    """R4: workers run and are killed on a store whose server loses, refuses and delays requests."""
    for number in range(kills):
        chance = 0.05 + 0.3 * ground.rng.random()
        faults = [
            S3Fault.REPLY_LOST,
            S3Fault.UNAVAILABLE_503,
            S3Fault.RESET,
            S3Fault.ERROR_AFTER,
            S3Fault.LATE,
        ]
        fault = faults[number % len(faults)]
        proxy.storm({fault: chance}, ground.rng)
        worker = ground.hatch(pace_ms=1.0)
        ground.wait_for(worker, "ack")
        ground.pause_ms(1_000.0)
        worker.kill()
        proxy.mend()
        proxy.land()
        ground.report.fault("R4", kills=1)
        ground.report.fault("R1")


def flipped_bits(ground: Ground, flips: int) -> None:
    """R15: bits of all files of a store at rest are flipped, one at a time, and readers must notice."""
    root = Path(ground.place) / "rows"
    with ground.open() as store:
        mark = store.leases.high_water.read()

        def read() -> object:
            snapshot = store.snapshot()
            check_high_water(mark, snapshot, store.log)
            return ledger_of(store), sorted(snapshot.txns.items())

        right, kinds = read(), list(file_kinds(root).values())
        for number in range(flips):
            files = kinds[number % len(kinds)]
            damage = flip(root, files[int(ground.rng.random() * len(files))], ground.rng)
            outcome, text = outcome_of(root, damage, read, right)
            ground.report.fault(
                "R15",
                flips=1,
                silent_wrong_reads=outcome is DamageOutcome.WRONG,
                silent_older_reads=outcome is DamageOutcome.OLDER,
            )
            if not outcome.is_kept:
                ground.report.violation(text)
