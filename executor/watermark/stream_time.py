"""The progress of one injected stream: its members, which of them are silent, and their watermarks.

A stream without members is one member. Its watermark is the least of its members' watermarks;
idle and gone members are left out, and without any other member it stands still. The watermark and the
declared status of members are journaled: after a restart every member continues from the watermark and
counts as just heard from, and a member that was idle or gone still is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from millpond.executor.inputs.injector import InjectorNode
from millpond.executor.time.clocks import EXACT, PercentileTimes
from millpond.executor.time.observations import (
    DEFAULT_MEMBER,
    InputObservation,
    RecentDelays,
    TimesSeen,
    Watch,
)
from millpond.executor.time.watermark_policies import IngressTime, InjectorLogic, stamp_of, wants_delays
from millpond.statestore.types import TIME_MAX_US, EventTimeMicros, WallTimeMicros

MemberStatus: TypeAlias = Literal["expected", "idle", "gone"]
"""What is declared of a member: ``idle`` until it is heard of again, ``gone`` until declared otherwise."""


_MEMBER_STATUSES: Final[tuple[MemberStatus, ...]] = ("expected", "idle", "gone")

_DELAYS_MIN: Final = 100
"""So many delays must have been measured before a percentile watermark leaves the low watermark."""


@dataclass(slots=True)
class _Member:
    """One sender: the running side of the policy, when it was last heard of, what is declared of it."""

    logic: InjectorLogic
    heard_us: int
    status: MemberStatus = "expected"
    changes: int = 0
    newest_at: EventTimeMicros | None = None
    delays: RecentDelays = field(default_factory=RecentDelays)
    promised: dict[float, EventTimeMicros] = field(default_factory=dict)

    def stand(self, status: MemberStatus) -> None:
        """Change what is declared of it."""
        self.changes += status != self.status
        self.status = status

    def mark(self, percentile: float) -> EventTimeMicros:
        """The watermark at a percentile: behind the newest record by the delay at it, or as the source declares it."""
        told = (at for declared, at in self.promised.items() if declared >= percentile)
        exact = max((self.logic.watermark, *told))
        if self.newest_at is None or len(self.delays) < _DELAYS_MIN:
            return exact
        return EventTimeMicros(max(exact, self.newest_at - self.delays.at(percentile)))


class InjectorTime:
    """The low watermark of one injected stream.

    Args:
        node: the injector.
        saved: the journaled watermark.
        now_us: the monotonic clock.
        percentile_watermarks: the journaled percentile watermarks, of all percentiles that the pipeline keeps.
        standings: what `standings` gave last time.

    Attributes:
        behind_us: how far behind its sender's watermark the latest record so far was; 0 if none was.
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
        self.behind_us: int = 0
        self._watermark = saved
        self._percentile_watermarks = dict(percentile_watermarks or {})
        names = node.members or (DEFAULT_MEMBER,)
        self._members = {name: _Member(node.watermark.start(saved), now_us) for name in names}
        for name, version in (standings or {}).items():
            if name in self._members:
                changes, code = divmod(version, len(_MEMBER_STATUSES))
                self._members[name].status, self._members[name].changes = _MEMBER_STATUSES[code], changes

    @property
    def watermark(self) -> EventTimeMicros:
        """Bound on the times of records still to come from members that are not idle; never falls."""
        return self._watermark

    def mark(self, percentile: float) -> EventTimeMicros:
        """The watermark at a percentile: about that share of the records before it has arrived."""
        return (
            self._watermark
            if percentile == EXACT
            else max(self._percentile_watermarks[percentile], self._watermark)
        )

    @property
    def is_ingress(self) -> bool:
        """Whether records get the time of their arrival."""
        return isinstance(self._node.at, IngressTime)

    def standings(self) -> dict[str, int]:
        """What was declared of each member of whom anything was, as a number that rises with each change."""
        return {
            name: one.changes * len(_MEMBER_STATUSES) + _MEMBER_STATUSES.index(one.status)
            for name, one in self._members.items()
            if one.changes
        }

    def watch(self, now: WallTimeMicros, *, with_delays: bool = False) -> Watch:
        """What tasks are to look at in the next superstep.

        Args:
            now: the wall time.
            with_delays: whether the pipeline declares percentiles.
        """
        newest = {name: one.newest_at for name, one in self._members.items() if one.newest_at is not None}
        return Watch(
            stream=self._node.stream,
            newest=newest,
            with_delays=with_delays or wants_delays(self._node.watermark),
            stamp_at=stamp_of(now, self._watermark) if self.is_ingress else None,
        )

    def observe(self, seen: InputObservation, now_us: int) -> None:
        """Take in what a superstep saw; it must be committed before the watermark is published."""
        for name, times in self._by_member(seen).items():
            member = self._members.get(name)
            if member is None:
                continue
            if member.logic.watermark != TIME_MAX_US:
                self.behind_us = max(self.behind_us, member.logic.watermark - times.oldest_at)
            member.heard_us = now_us
            if member.status == "idle":
                member.stand("expected")
            member.logic.observe(times)
            if self._percentile_watermarks and times.delays is not None:
                member.delays.merge(times.delays)
            member.newest_at = max(times.newest_at, member.newest_at or times.newest_at)
        self.settle(now_us)

    def _by_member(self, seen: InputObservation) -> Mapping[str, TimesSeen]:
        if self._node.members:
            return seen.members
        if seen.newest_at is None:
            return {}
        oldest_at = seen.newest_at if seen.oldest_at is None else seen.oldest_at
        return {
            DEFAULT_MEMBER: TimesSeen(
                newest_at=seen.newest_at, oldest_at=oldest_at, delays=seen.delays, mark_at=seen.mark_at
            )
        }

    def hear(self, now_us: int) -> None:
        """Note that records are on their way; whose, is known only when they have been read."""
        if not self._node.members:
            self._members[DEFAULT_MEMBER].heard_us = now_us

    def advance(
        self, at: EventTimeMicros, now_us: int, member: str | None = None, percentile: float = EXACT
    ) -> None:
        """Note the promise that ``percentile`` percent of the source's, or member's, records before ``at`` have arrived.

        Raises:
            InvalidError: no such member is expected.
        """
        chosen = self._chosen(member)
        for sender in chosen:
            if percentile == EXACT:
                sender.logic.advance(at)
            else:
                sender.promised[percentile] = max(at, sender.promised.get(percentile, at))
            sender.heard_us = now_us
            if sender.status == "idle":
                sender.stand("expected")
        self.settle(now_us)

    def finish(self, now_us: int) -> None:
        """Note that the input has ended, whichever members are missing."""
        for member in self._members.values():
            member.logic.finish()
        self._watermark = TIME_MAX_US
        self.settle(now_us)

    def declare(self, status: MemberStatus, now_us: int, member: str | None = None) -> None:
        """Say of a member (``None``: of the stream) that it is idle, gone, or expected again.

        Raises:
            InvalidError: no such member is expected.
        """
        chosen = self._chosen(member)
        for sender in chosen:
            sender.stand(status)
            sender.heard_us = now_us
        self.settle(now_us)

    def _chosen(self, member: str | None) -> Iterable[_Member]:
        self._node.check_member(member)
        return self._members.values() if member is None else [self._members[member]]

    def settle(self, now_us: int) -> None:
        """Work out the watermark; silence may have moved it."""
        heard = [member for member in self._members.values() if not self._is_silent(member, now_us)]
        if heard:
            self._watermark = max(self._watermark, min(member.logic.watermark for member in heard))
            for percentile, known in self._percentile_watermarks.items():
                self._percentile_watermarks[percentile] = max(
                    known, min(member.mark(percentile) for member in heard)
                )

    def is_idle(self, now_us: int) -> bool:
        """Whether every member is idle or gone, though the input has not ended."""
        return self._watermark != TIME_MAX_US and all(
            self._is_silent(member, now_us) for member in self._members.values()
        )

    def _is_silent(self, member: _Member, now_us: int) -> bool:
        if member.status != "expected":
            return True
        after_us = self._node.idle_after_us
        return after_us is not None and now_us - member.heard_us >= after_us
