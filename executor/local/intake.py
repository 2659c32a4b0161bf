"""The intake: what has been injected and waits for the next bundle.

It is bounded: a caller that injects faster than the pipeline works waits (backpressure) instead of
filling memory, and so does a stream that is too far ahead of the others (`Intake.hold_back`).
Records and watermark updates keep the order of the calls. What arrives while a commit is in flight
makes the next bundle: that is the group commit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from millpond.executor.local.fit import check_still_fits
from millpond.executor.pipeline.extract_rows import Rows
from millpond.executor.pipeline.topology import Topology
from millpond.executor.run.status import WatermarkUpdate
from millpond.statestore.errors import UnavailableError


class Receipt:
    """Tells when injected rows, or a watermark update, are durable; safe to use from any thread.

    Args:
        parts: the number of pieces that are committed one by one.
    """

    __slots__ = ("_done", "_failure", "_parts")

    def __init__(self, parts: int = 1) -> None:
        self._parts = parts
        self._failure: BaseException | None = None
        self._done = threading.Event()
        if not parts:
            self._done.set()

    @property
    def is_durable(self) -> bool:
        """Whether all pieces have been committed."""
        return self._done.is_set() and self._failure is None

    def wait(self, timeout_ms: float | None = None) -> bool:
        """Wait until all pieces have been committed.

        Args:
            timeout_ms: how long to wait; ``None`` waits as long as the run lives.

        Returns:
            Whether they have been, within the time.

        Raises:
            MillpondError: the error that ended the run; pieces may or may not be durable.
        """
        if not self._done.wait(None if timeout_ms is None else timeout_ms / 1_000):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def settle(self, failure: BaseException | None = None) -> None:
        """Note that one piece has been committed, or that no more will be; only the run calls it.

        Args:
            failure: the error that ended the run; ``None`` if the piece is durable.
        """
        self._parts -= 1
        if failure is not None:
            self._failure = failure
        if failure is not None or self._parts <= 0:
            self._done.set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """Injected rows of one stream.

    Attributes:
        stream: the stream.
        rows: the rows.
        count: how many there are.
        receipt: tells when they are durable.
        checked: the topology that they fit; ``None`` if no update can come in between.
    """

    stream: str
    rows: Rows
    count: int
    receipt: Receipt
    checked: Topology | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateEntry:
    """A watermark update that waits its turn.

    Attributes:
        update: the update.
        receipt: tells when it is durable.
        checked: the topology that it fits; ``None`` if no update can come in between.
    """

    update: WatermarkUpdate
    receipt: Receipt
    checked: Topology | None = None

    @property
    def stream(self) -> str:
        """The stream that it is about."""
        return self.update.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The input of the next superstep: first the updates, then the arrivals.

    Attributes:
        updates: watermark updates, in order.
        arrivals: injected rows, in order.
    """

    updates: list[UpdateEntry] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.updates or self.arrivals)

    def fitting(self, topology: Topology) -> Taken:
        """What fits the pipeline as it is; the senders of the rest are told why theirs does not.

        Args:
            topology: the pipeline that runs; entries that wait may have been checked against a former one.
        """
        return Taken(
            updates=[entry for entry in self.updates if _fits(entry, topology)],
            arrivals=[entry for entry in self.arrivals if _fits(entry, topology)],
        )

    def settle(self, failure: BaseException | None = None) -> None:
        """Settle all receipts.

        Args:
            failure: the error that ended the run; ``None`` if all of the input is durable.
        """
        for update in self.updates:
            update.receipt.settle(failure)
        for arrival in self.arrivals:
            arrival.receipt.settle(failure)


def _fits(entry: Arrival | UpdateEntry, topology: Topology) -> bool:
    former = entry.checked
    if former is None or former is topology:
        return True
    try:
        if isinstance(entry, UpdateEntry):
            entry.update.check(topology)
        else:
            check_still_fits(topology, former, entry.stream, entry.rows)
    except Exception as refusal:  # noqa: BLE001 - a key extractor of the user's may raise anything
        entry.receipt.settle(refusal)
        return False
    return True


class Intake:
    """A bounded queue between any number of producers and one worker.

    Args:
        records_max: how many records may wait; a larger arrival is accepted only into an empty queue.
    """

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._condition = threading.Condition()
        self._entries: deque[Arrival | UpdateEntry] = deque()
        self._held: dict[str, list[Arrival | UpdateEntry]] = {}
        self._records = 0
        self._idle = False
        self._is_woken = False
        self._ended: BaseException | None = None

    # -- producers -------------------------------------------------------------------------

    def put(self, entry: Arrival | UpdateEntry, *, timeout_ms: float | None) -> None:
        """Append rows or a watermark update, waiting while the intake is full.

        Args:
            entry: the rows, or the update.
            timeout_ms: how long to wait for room; ``None`` waits as long as the run lives.

        Raises:
            UnavailableError: the intake stayed full.
            MillpondError: the error that ended the run.
        """
        count = entry.count if isinstance(entry, Arrival) else 0
        with self._condition:
            has_room = self._condition.wait_for(
                lambda: self._ended is not None or self._has_room(entry.stream, count),
                None if timeout_ms is None else timeout_ms / 1_000,
            )
            if self._ended is not None:
                raise self._ended
            if not has_room and count and entry.stream in self._held:
                raise UnavailableError(
                    "the stream is further ahead than its skew limit: let the others catch up",
                    stream=entry.stream,
                )
            if not has_room:
                raise UnavailableError(
                    "the intake is full: let the pipeline catch up",
                    waiting=self._records,
                    allowed=self._records_max,
                )
            self._held.get(entry.stream, self._entries).append(entry)
            self._records += count
            self._idle = False
            self._condition.notify_all()

    def wait_until_idle(self, timeout_ms: float | None = None) -> bool:
        """Wait until the worker has nothing left to do.

        Returns:
            Whether that was so within the time.

        Raises:
            MillpondError: the error that ended the run.
        """
        with self._condition:
            done = self._condition.wait_for(
                lambda: self._ended is not None or (self._idle and not self._entries),
                None if timeout_ms is None else timeout_ms / 1_000,
            )
            if self._ended is not None:
                raise self._ended
            return done

    def _has_room(self, stream: str, count: int) -> bool:
        if count and stream in self._held:
            return False
        return not self._records or self._records + count <= self._records_max

    # -- the worker ------------------------------------------------------------------------

    def take(self, records_max: int) -> Taken:
        """Remove the next entries: updates first, then arrivals up to the next update or the limit.

        Args:
            records_max: how many records to take; one arrival is taken even if it has more.
        """
        taken = Taken()
        records = 0
        with self._condition:
            while self._entries:
                entry = self._entries[0]
                if isinstance(entry, UpdateEntry):
                    if taken.arrivals:
                        break
                    taken.updates.append(entry)
                else:
                    if taken.arrivals and records + entry.count > records_max:
                        break
                    taken.arrivals.append(entry)
                    records += entry.count
                self._entries.popleft()
            self._records -= records
            if taken:
                self._condition.notify_all()
        return taken

    def hold_back(self, streams: Collection[str]) -> None:
        """Hold entries of these streams until a later call no longer names them; adding records to them waits.

        Entries that wait already are kept, and do not count against the room of other streams: so at
        most one intake's worth of each stream is held.

        Args:
            streams: the streams that are too far ahead.
        """
        with self._condition:
            if streams == self._held.keys():
                return
            released = [entry for stream in self._held.keys() - set(streams) for entry in self._held[stream]]
            waiting = [*released, *self._entries]
            kept = {stream: self._held.get(stream, []) for stream in streams}
            self._entries.clear()
            for entry in waiting:
                kept.get(entry.stream, self._entries).append(entry)
            self._held = kept
            self._records = sum(entry.count for entry in self._entries if isinstance(entry, Arrival))
            self._condition.notify_all()

    def wake(self) -> None:
        """End the `rest` under way, or else the next one, though no entry has arrived."""
        with self._condition:
            self._idle = False
            self._is_woken = True
            self._condition.notify_all()

    def rest(self, timeout_ms: float) -> None:
        """Note that nothing is left to do, and sleep until an entry arrives, or for ``timeout_ms``."""
        with self._condition:
            is_woken, self._is_woken = self._is_woken, False
            if not self._entries and self._ended is None and not is_woken:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait(timeout_ms / 1_000)
                self._idle = False

    def end(self, reason: BaseException) -> None:
        """Refuse all entries, waiting and future, with ``reason``, and wake all waiting threads."""
        with self._condition:
            if self._ended is None:
                self._ended = reason
            held = [entry for entries in self._held.values() for entry in entries]
            entries, self._records = [*self._entries, *held], 0
            self._entries.clear()
            self._held.clear()
            self._condition.notify_all()
        for entry in entries:
            entry.receipt.settle(self._ended)
