"""A relay of owners: each is killed or stopped at work, and its standby takes over by itself.

One store, one ZooKeeper, real processes (`tests.processes.standby`). `Relay.hand_over` takes the
owner down, starts the next standby, and measures how long the store was without a working owner.
"""

from __future__ import annotations

import math
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from millpond.statestore.errors import InternalError
from millpond.statestore.store import Store
from millpond.statestore.types import Clock
from millpond.testing.processes.ledger import ledger_of

_PATIENCE_S: Final = 120.0
_LINES_MAX: Final = 1_000_000
_PACE_RECORDS: Final = 20
_RATE: Final = 0.8
_POLL_MS: Final = 20.0
_NUMBERS: Final = 1_000_000
"""Record numbers of each process start at its own multiple of this."""


class Runner:
    """One process of the relay.

    Args:
        path: the store.
        hosts: ZooKeeper.
        session_timeout_ms: timeout of its ZooKeeper session.
        first: number of its first record.
        clock: timestamps its output.
    """

    def __init__(self, path: Path, hosts: str, session_timeout_ms: int, first: int, clock: Clock) -> None:
        command = [sys.executable, "-m", "tests.processes.standby", str(path), hosts]
        self._process = subprocess.Popen(
            [*command, str(session_timeout_ms), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._clock = clock
        self._lines: queue.Queue[tuple[str, int]] = queue.Queue(maxsize=_LINES_MAX)
        self.acknowledged: list[int] = []
        self.acknowledged_us: list[int] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            heard_us = self._clock.monotonic_us()
            word, _, number = line.strip().partition(" ")
            if word == "acknowledged":
                self.acknowledged.append(int(number))
                self.acknowledged_us.append(heard_us)
            self._lines.put((line.strip(), heard_us))

    def wait_for(self, beginning: str) -> int:
        """Return the time at which the next output line with this prefix was read, in microseconds.

        Raises:
            InternalError: no such line came in time.
        """
        while True:
            try:
                line, heard_us = self._lines.get(timeout=_PATIENCE_S)
            except queue.Empty:
                raise InternalError("the process did not print the expected line", wanted=beginning) from None
            if line.startswith(beginning):
                return heard_us

    def paces_us(self) -> list[float]:
        """Return mean microseconds between acknowledgements, over each sliding stretch of records."""
        times = list(self.acknowledged_us)
        stretches = zip(times, times[_PACE_RECORDS:], strict=False)
        return [(end_us - start_us) / _PACE_RECORDS for start_us, end_us in stretches]

    def wait_for_pace(self, pace_us: float) -> int:
        """Return the time at which a stretch of acknowledgements at this pace had ended, in microseconds.

        Raises:
            InternalError: the process did not reach the pace in time.
        """
        until_us = self._clock.monotonic_us() + int(_PATIENCE_S * 1e6)
        while self._clock.monotonic_us() < until_us:
            for index, found_us in enumerate(self.paces_us()):
                if found_us <= pace_us:
                    return self.acknowledged_us[index + _PACE_RECORDS]
            self._clock.sleep_ms(_POLL_MS)
        raise InternalError("the process is slower than the one before", wanted_us=pace_us)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        """Kill the process if it is alive, and read the rest of its output."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """One owner down, the next at work.

    Attributes:
        signal: the signal that took the owner down.
        open_ms: from the signal until the next owner held the rows.
        work_ms: from the signal until a record of the next owner was durable.
        rate_ms: from the signal until the next owner reached four fifths of the previous rate.
        fenced: whether the former owner was fenced when it resumed; ``None`` if it was killed.
    """

    signal: str
    open_ms: float
    work_ms: float
    rate_ms: float
    fenced: bool | None


@dataclass
class Relay:
    """An owner at work, with a standby.

    Args:
        path: the store; must exist.
        hosts: ZooKeeper.
        session_timeout_ms: session timeout of every process.
        clock: measures.
    """

    path: Path
    hosts: str
    session_timeout_ms: int
    clock: Clock
    _runners: list[Runner] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._start().wait_for("acknowledged")
        self._start().wait_for("standing by")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for runner in self._runners:
            runner.end()

    def _start(self) -> Runner:
        first = len(self._runners) * _NUMBERS
        runner = Runner(self.path, self.hosts, self.session_timeout_ms, first, self.clock)
        self._runners.append(runner)
        return runner

    def hand_over(self, number: signal.Signals) -> Handover:
        """Take the owner down with a signal, and wait until the standby is at work.

        A stopped owner is resumed afterwards, and must find that it has been fenced.
        """
        owner, standby = self._runners[-2:]
        owner.wait_for_pace(math.inf)
        pace_us = owner.paces_us()[-1]
        gone_us = self.clock.monotonic_us()
        owner.signal(number)
        opened_us = standby.wait_for("at work")
        worked_us = standby.wait_for("acknowledged")
        rated_us = standby.wait_for_pace(pace_us / _RATE)
        fenced = None
        if number == signal.SIGSTOP:
            owner.signal(signal.SIGCONT)
            owner.wait_for("fenced")
            fenced = True
        owner.end()
        # Start only one standby at a time: with two, either could take over.
        self._start().wait_for("standing by")
        return Handover(
            signal=number.name,
            open_ms=(opened_us - gone_us) / 1_000,
            work_ms=(worked_us - gone_us) / 1_000,
            rate_ms=(rated_us - gone_us) / 1_000,
            fenced=fenced,
        )

    def finish(self) -> tuple[int, int, int]:
        """End all processes and read the ledger.

        Returns the numbers of acknowledged, missing and repeated records.
        """
        for runner in self._runners:
            runner.end()
        acknowledged = {number for runner in self._runners for number in runner.acknowledged}
        with Store.open(self.path, read_only=True) as store:
            counts = Counter(number for numbers in ledger_of(store).values() for number in numbers)
        return (
            len(acknowledged),
            len(acknowledged - counts.keys()),
            sum(times > 1 for times in counts.values()),
        )
