"""
The intake: what has been injected and waits for the next bundle.

It is bounded: who injects faster than the pipeline works waits (backpressure) instead of filling
memory, and so does a stream that is too far ahead of the others (`Intake.hold_back`). Records and movements of watermarks keep the order in which they were handed in. What
arrives while a commit is in flight makes the next bundle: that is the group commit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from millpond.executor.pipeline.extract_rows import Rows
from millpond.executor.watermark.stream_time import MemberStatus
from millpond.statestore.errors import UnavailableError
from millpond.statestore.types import EventTimeMicros

__all__ = ["Arrival", "Intake", "Receipt", "Taken", "WatermarkUpdate"]


class Receipt:
    """
    Tells when what was handed in has become durable; safe to use from any thread.

    Args:
        parts: into how many pieces it was cut.
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
        """
        Whether everything has been committed.
        """
        return self._done.is_set() and self._failure is None

    def wait(self, timeout_ms: float | None = None) -> bool:
        """
        Wait until everything has been committed.

        Returns:
            Whether it has, within the time.

        Raises:
            MillpondError: what ended the run; nothing is known to be durable.
        """
        if not self._done.wait(None if timeout_ms is None else timeout_ms / 1_000):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def settle(self, failure: BaseException | None = None) -> None:
        """
        One piece has been committed, or nothing more will be; only the run calls this.
        """
        self._parts -= 1
        if failure is not None:
            self._failure = failure
        if failure is not None or self._parts <= 0:
            self._done.set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrival:
    """
    Outside rows of one stream.
    """

    stream: str
    rows: Rows
    count: int
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WatermarkUpdate:
    """
    What the source says about one stream, or about one of its members.

    Attributes:
        stream: the stream.
        at: nothing older than this will come; ``None``: no promise.
        percentile: of so many percent of the records, the promise is.
        status: whether it is idle, gone or expected; ``None``: that stays.
        member: the member; ``None``: all of the stream.
        receipt: tells when it has been taken in.
    """

    stream: str
    at: EventTimeMicros | None
    receipt: Receipt
    status: MemberStatus | None = None
    member: str | None = None
    percentile: float = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """
    What the next superstep handles: first the movements, then the arrivals.
    """

    movements: list[WatermarkUpdate] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.movements or self.arrivals)

    def settle(self, failure: BaseException | None = None) -> None:
        """
        Tell everybody who waits how it went.
        """
        for movement in self.movements:
            movement.receipt.settle(failure)
        for arrival in self.arrivals:
            arrival.receipt.settle(failure)


class Intake:
    """
    A queue between many who inject and one who works.

    Args:
        records_max: how many records may wait; one arrival that is larger is let in alone.
    """

    def __init__(self, records_max: int) -> None:
        self._records_max = records_max
        self._condition = threading.Condition()
        self._entries: deque[Arrival | WatermarkUpdate] = deque()
        self._held: dict[str, list[Arrival | WatermarkUpdate]] = {}
        self._records = 0
        self._idle = False
        self._ended: BaseException | None = None

    # -- those who inject ------------------------------------------------------------------

    def put(self, entry: Arrival | WatermarkUpdate, *, timeout_ms: float | None) -> None:
        """
        Hand something in, waiting while the intake is full.

        Args:
            entry: what.
            timeout_ms: how long to wait for room; ``None`` waits as long as the run lives.

        Raises:
            UnavailableError: no room came free in time.
            MillpondError: what ended the run.
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
        """
        Wait until the worker has found nothing left to do.

        Returns:
            Whether it has, within the time.

        Raises:
            MillpondError: what ended the run.
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

    # -- the one who works -----------------------------------------------------------------

    def take(self, records_max: int) -> Taken:
        """
        What comes next: movements first, then arrivals up to the next movement or the limit.
        """
        taken = Taken()
        records = 0
        with self._condition:
            while self._entries:
                entry = self._entries[0]
                if isinstance(entry, WatermarkUpdate):
                    if taken.arrivals:
                        break
                    taken.movements.append(entry)
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
        """
        Keep what is on these streams until they are no longer named, and let nobody add to it.

        What was waiting already stays, and no longer counts against the room of the others: so
        at most one intake's worth of each stream is kept.
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

    def rest(self, timeout_ms: float) -> None:
        """
        Nothing is left to do: say so, and sleep until something comes, or for ``timeout_ms``.
        """
        with self._condition:
            if not self._entries and self._ended is None:
                self._idle = True
                self._condition.notify_all()
                self._condition.wait(timeout_ms / 1_000)
                self._idle = False

    def end(self, reason: BaseException) -> None:
        """
        Refuse everything from now on with ``reason``, and wake everybody.
        """
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
