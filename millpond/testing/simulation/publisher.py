"""The publisher: creates records, sends them until they are acknowledged, and promises watermarks.

It stands for the systems outside Millpond: it repeats records without an answer, and the network
may still repeat a record after its acknowledgement. Messages with records so old that their ids
may be forgotten are dropped, as a network drops packets whose time to live is over.

One publisher's clock may be days fast. It moves the watermark past all that the others send, who may still repeat
their records for as long as ids are kept on the wall clock, which in such a world is longer than it lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from millpond.testing.simulation.process import Message, SimulatedProcess
from millpond.testing.simulation.workload import Sent, Workload
from millpond.testing.simulation.world import World

ID_SLACK_MS: Final = 60_000
"""How long ids are kept in simulated stores; less than a message lives."""

ID_SLACK_MS_LATE: Final = 2 * 86_400_000
"""The same where records are late: longer than a simulation lasts, and than all jumps of its clocks together."""

_FAST_US: Final = 2 * ID_SLACK_MS_LATE * 1_000

_LIFETIME_US: Final = 40_000_000
_RESEND_US: Final = 2_000_000
_DISORDER_US: Final = 4_000_000
_AT_ONCE: Final = 6
_DELAY_MS_MAX: Final = 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What publishers had done at a moment.

    Attributes:
        sent: how many records they had created.
        unacknowledged: the unacknowledged numbers.
        promised: the watermarks that they had promised, by stream.
        fast: the streams whose clock was fast.
    """

    sent: int
    unacknowledged: frozenset[int]
    promised: Mapping[str, int]
    fast: frozenset[str]


class Publisher:
    """All publishers of a world, and the network between them and the processes.

    Args:
        world: the world they live in.
        workload: creates the records.
        streams: the injected streams.
        targets: returns the processes that can be reached.
    """

    def __init__(
        self,
        world: World,
        workload: Workload,
        streams: Iterable[str],
        targets: Callable[[], list[SimulatedProcess]],
    ) -> None:
        self.sent: list[Sent] = []
        self._world = world
        self._workload = workload
        self._targets = targets
        self._unacknowledged: dict[int, Sent] = {}
        self._last_sent_us: dict[int, int] = {}
        self._promised: dict[str, int] = {}
        self._fast: set[str] = set()
        self._streams = tuple(streams)
        self._rewinds = 0

    def published(self) -> Published:
        """What has been done up to now."""
        return Published(
            sent=len(self.sent),
            unacknowledged=frozenset(self._unacknowledged),
            promised=dict(self._promised),
            fast=frozenset(self._fast),
        )

    def begin_with(self, sent: Iterable[Sent], published: Published) -> None:
        """Be the publishers of a fork: copies of the original's publishers, who know nothing of later events."""
        self.sent = [
            replace(
                one, acknowledged_us=None if one.number in published.unacknowledged else one.acknowledged_us
            )
            for one in list(sent)[: published.sent]
        ]
        self.go_back(published)

    def go_back(self, published: Published) -> None:
        """Resend the records that were unacknowledged then; records under way are lost."""
        self._rewinds += 1
        self._promised, self._fast = dict(published.promised), set(published.fast)
        again = [
            one for one in self.sent if one.number >= published.sent or one.number in published.unacknowledged
        ]
        for one in again:
            one.acknowledged_us = None
        self._unacknowledged = {one.number: one for one in again}
        self._last_sent_us.clear()

    @property
    def waits(self) -> bool:
        """Return True while a record is unacknowledged."""
        return bool(self._unacknowledged)

    def publish(self) -> None:
        """Create new records, and send them along with some that were not acknowledged in time."""
        draw, world = self._world.draw, self._world
        fresh = min(draw.number(1, 3), self._workload.records_max - len(self.sent))
        for _ in range(max(fresh, 0)):
            self._create()
        due = [
            number
            for number in self._unacknowledged
            if world.now_us - self._last_sent_us.get(number, 0) >= _RESEND_US
        ]
        self._send(due[:_AT_ONCE])
        if self.sent and world.swarm.strikes("sent_again"):
            self._send([draw.choice(self.sent).number for _ in range(draw.number(1, 3))])

    def repeat(self) -> None:
        """Send every record that is not acknowledged."""
        self._send(list(self._unacknowledged))

    def promise(self) -> None:
        """Promise that no record older than the oldest unacknowledged one will follow."""
        for stream in self._streams:
            open_at = [s.row["at"] for s in self._unacknowledged.values() if s.stream == stream]
            at = min([self._world.now_us - _DISORDER_US, *open_at])
            if self._workload.has_late_records and self._world.swarm.strikes("fast_clock"):
                at = self._world.now_us + _FAST_US
                self._fast.add(stream)
                self._world.tell("publisher", f"has a fast clock on {stream}")
            if at > self._promised.get(stream, 0):
                self._promised[stream] = at
            self._transmit(Message(stream, promise=self._promised.get(stream, at)))

    def promised(self, stream: str) -> int:
        """The last promised watermark, in microseconds."""
        return self._promised.get(stream, 0)

    def acknowledge(self, message: Message) -> None:
        """A process reports that the effects of a message's records are durable."""
        if message.rewinds != self._rewinds or self._world.swarm.strikes("ack_lost"):
            return
        for number in message.numbers:
            sent = self._unacknowledged.pop(number, None)
            if sent is not None:
                sent.acknowledged_us = self._world.now_us

    def _create(self) -> None:
        world = self._world
        number = len(self.sent)
        stream, row = self._workload.record(world.draw, number, poison=world.swarm.strikes("poison"))
        at = world.now_us - world.draw.number(0, _DISORDER_US)
        if stream not in self._fast:
            at = max(at, self.promised(stream))
        sent = Sent(number, stream, {**row, "id": f"#{number}", "at": at}, world.now_us)
        self.sent.append(sent)
        self._unacknowledged[number] = sent

    def _send(self, numbers: list[int]) -> None:
        by_stream: dict[str, list[Sent]] = {}
        for number in numbers:
            self._last_sent_us[number] = self._world.now_us
            sent = self.sent[number]
            by_stream.setdefault(sent.stream, []).append(sent)
        for stream, records in by_stream.items():
            rows = tuple(sent.row for sent in records)
            self._transmit(Message(stream, rows, tuple(sent.number for sent in records)))

    def _transmit(self, message: Message) -> None:
        swarm, world = self._world.swarm, self._world
        message = replace(message, rewinds=self._rewinds)
        if swarm.strikes("message_lost"):
            world.tell("network", f"loses {message.numbers}")
            return
        for _ in range(2 if swarm.strikes("message_twice") else 1):
            if swarm.strikes("message_delayed"):
                world.later(world.draw.number(1, _DELAY_MS_MAX), lambda: self._deliver(message))
            else:
                self._deliver(message)

    def _deliver(self, message: Message) -> None:
        if message.rewinds != self._rewinds:
            return
        targets = self._targets()
        too_old = self.promised(message.stream) - _LIFETIME_US
        is_mortal = message.stream not in self._fast
        if not targets or (is_mortal and any(row["at"] < too_old for row in message.rows)):
            return
        target = self._world.draw.choice(targets)
        target.inbox.append(message)
        self._world.tell("network", f"{target.name} gets {message.numbers or message.promise}")
