"""The progress of one injected stream: its members, their silence, and their watermarks.

A stream without members is one member. Its watermark is the least of its members' watermarks; idle and gone members
are left out, and without any other member it stands still. The watermark and the declared status of members are
journaled: after a restart every member continues from the watermark, counts as just heard from, and keeps its status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from millpond.executor.inputs.extraction import InjectorNode
from millpond.executor.time.clocks import EXACT, PercentileTimes
from millpond.executor.time.instants import INSTANT_MAX_US
from millpond.executor.time.observations import (
    DEFAULT_MEMBER,
    InputObservation,
    RecentDelays,
    Watch,
)
from millpond.executor.time.watermark_policies import IngressTime, InjectorLogic, stamp_of, wants_delays
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US, EventTimeMicros, WallTimeMicros

MemberStatus: TypeAlias = Literal["expected", "idle", "gone"]
"""The declared status of a member: ``idle`` until it is heard from again, ``gone`` until declared otherwise."""


_MEMBER_STATUSES: Final[tuple[MemberStatus, ...]] = ("expected", "idle", "gone")

# Measured delays before a percentile watermark leaves the low watermark.
_DELAYS_MIN: Final = 100


@dataclass(slots=True)
class _Member:
    """One sender: the running side of the policy, the last time it was heard from, and its declared status."""

    logic: InjectorLogic
    heard_us: int
    status: MemberStatus = "expected"
    changes: int = 0
    newest_at: EventTimeMicros | None = None
    delays: RecentDelays = field(default_factory=RecentDelays)
    promised: dict[float, EventTimeMicros] = field(default_factory=dict)

    def declare(self, status: MemberStatus) -> None:
        self.changes += status != self.status
        self.status = status

    def hear(self, now_us: int) -> None:
        self.heard_us = now_us
        if self.status == "idle":
            self.declare("expected")

    def mark(self, percentile: float) -> EventTimeMicros:
        """Return the watermark at a percentile: behind the newest record by that delay, or as the source declares it."""
        declared = (at for share, at in self.promised.items() if share >= percentile)
        exact = max((self.logic.watermark, *declared))
        if self.newest_at is None or len(self.delays) < _DELAYS_MIN:
            return exact
        return EventTimeMicros(max(exact, self.newest_at - self.delays.at(percentile)))


class InjectorTime:
    """The low watermark of one injected stream.

    Args:
        percentile_watermarks: the journaled percentile watermarks, of all percentiles that the pipeline keeps.

    Attributes:
        stream: the stream's name.
        behind_us: how far behind its sender's watermark the latest late record so far was; 0 if none was.
        watermark: bound on the times of records still to come from members that are not idle; never falls.
        is_ingress: records get the time of their arrival.
    """

    def __init__(
        self,
        node: InjectorNode,
        saved: EventTimeMicros,
        now_us: int,
        percentile_watermarks: PercentileTimes | None = None,
        standings: Mapping[str, int] | None = None,
    ) -> None:
        self._node = node
        self.stream: str = node.stream
        self.behind_us: int = 0
        self.watermark: EventTimeMicros = saved
        self.is_ingress: bool = isinstance(node.at, IngressTime)
        self._wants_delays = wants_delays(node.watermark)
        self._percentile_watermarks = dict(percentile_watermarks or {})
        self._silence: tuple[int, EventTimeMicros] | None = None
        names = node.members or (DEFAULT_MEMBER,)
        self._members = {name: _Member(node.watermark.start(saved), now_us) for name in names}
        for name, version in (standings or {}).items():
            if name in self._members:
                changes, code = divmod(version, len(_MEMBER_STATUSES))
                self._members[name].status, self._members[name].changes = _MEMBER_STATUSES[code], changes

    def mark(self, percentile: float) -> EventTimeMicros:
        """Return the watermark at a percentile: about that share of the records before it has arrived."""
        if percentile == EXACT:
            return self.watermark
        return max(self._percentile_watermarks[percentile], self.watermark)

    def standings(self) -> dict[str, int]:
        """Return the declared statuses, each as a number that rises with every change."""
        standings = {}
        for name, member in self._members.items():
            if member.changes:
                code = _MEMBER_STATUSES.index(member.status)
                standings[name] = member.changes * len(_MEMBER_STATUSES) + code
        return standings

    def watch(self, now: WallTimeMicros, *, with_delays: bool = False) -> Watch:
        """Return the instructions for tasks of the next superstep; delays are for pipelines with percentiles."""
        newest, stamp_at = {}, None
        if self.is_ingress:
            stamp_at = stamp_of(now, self.watermark)
        elif self._node.ahead is not None:
            stamp_at = EventTimeMicros(now)
        for name, member in self._members.items():
            if member.newest_at is not None:
                newest[name] = member.newest_at
        return Watch(
            stream=self._node.stream,
            newest=newest,
            with_delays=with_delays or self._wants_delays,
            stamp_at=stamp_at,
            ahead=self._node.ahead,
        )

    def observe(self, seen: InputObservation, now_us: int) -> None:
        """Take in the observation of a superstep; it must be committed before the watermark is published."""
        whole = {} if seen.times is None else {DEFAULT_MEMBER: seen.times}
        for name, times in (seen.members if self._node.members else whole).items():
            member = self._members.get(name)
            if member is None:
                continue
            watermark = member.logic.watermark
            if watermark != TIME_MAX_US:
                self.behind_us = max(self.behind_us, watermark - times.oldest_at)
            member.hear(now_us)
            member.logic.observe(times)
            if self._percentile_watermarks and times.delays is not None:
                member.delays.merge(times.delays)
            member.newest_at = max(times.newest_at, member.newest_at or times.newest_at)
        self.settle(now_us)

    def hear(self, now_us: int) -> None:
        """Record that records are on their way; their member is known only when they have been read."""
        if not self._node.members:
            self._members[DEFAULT_MEMBER].heard_us = now_us

    def advance(
        self, at: EventTimeMicros, now_us: int, member: str | None = None, percentile: float = EXACT
    ) -> None:
        """Record the promise that ``percentile`` percent of the stream's, or member's, records before ``at`` have arrived."""
        for sender in self._chosen(member):
            if percentile == EXACT:
                sender.logic.advance(at)
            else:
                sender.promised[percentile] = max(at, sender.promised.get(percentile, at))
            sender.hear(now_us)
        self.settle(now_us)

    def finish(self, now_us: int) -> None:
        for member in self._members.values():
            member.logic.finish()
        self.watermark = TIME_MAX_US
        self.settle(now_us)

    def declare(self, status: MemberStatus, now_us: int, member: str | None = None) -> None:
        for sender in self._chosen(member):
            sender.declare(status)
            sender.heard_us = now_us
        self.settle(now_us)

    def _chosen(self, member: str | None) -> Iterable[_Member]:
        self._node.check_member(member)
        return self._members.values() if member is None else [self._members[member]]

    def settle(self, now_us: int) -> None:
        members = self._members.values()
        heard = [member for member in members if not self._is_silent(member, now_us)]
        # Where all are silent, one that never sent anything leaves the others their time.
        heard = heard or [member for member in members if member.logic.watermark != TIME_MIN_US]
        if not heard:
            return
        self.watermark = max(self.watermark, min(member.logic.watermark for member in heard))
        for percentile, known in self._percentile_watermarks.items():
            self._percentile_watermarks[percentile] = max(
                known, min(member.mark(percentile) for member in heard)
            )

    def is_idle(self, now_us: int) -> bool:
        return self.watermark != TIME_MAX_US and all(
            self._is_silent(member, now_us) for member in self._members.values()
        )

    @property
    def heard_us(self) -> int:
        """When the stream, or a member of it, was last heard from."""
        return max(member.heard_us for member in self._members.values())

    @property
    def may_lead(self) -> bool:
        """True if event time may pass with the clock where this stream falls silent, because it is known."""
        return self._node.idle_after_us is not None and TIME_MIN_US < self.watermark < TIME_MAX_US

    def pass_silence(self, now_us: int) -> None:
        """Move the watermark of a silent stream by the time since it was last heard from."""
        heard_us = self.heard_us
        if self._silence is None or self._silence[0] != heard_us:
            self._silence = heard_us, self.watermark
        at = min(self._silence[1] + now_us - heard_us, INSTANT_MAX_US)
        self.watermark = max(self.watermark, EventTimeMicros(at))

    def _is_silent(self, member: _Member, now_us: int) -> bool:
        if member.status != "expected":
            return True
        after_us = self._node.idle_after_us
        return after_us is not None and now_us - member.heard_us >= after_us
