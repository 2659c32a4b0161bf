"""The balancer: looks at the load of a pipeline's intervals from time to time, and says which keys to cut.

Cuts by hand come from outside: a position in the table asks for one, and the commit that makes the cut answers it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from millpond.executor.balance.cuts import HotKey, cuts_for, hot_keys
from millpond.executor.balance.loads import Loads
from millpond.executor.balance.policy import BalancePolicy
from millpond.executor.balance.requests import waiting_requests
from millpond.executor.bundle.result import Manifest
from millpond.executor.ownership.cut import Cut
from millpond.executor.ownership.ownership import Ownership
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import JsonValue
from millpond.statestore.types import Clock

_LOG = logging.getLogger("millpond")
_ASKED_EVERY_US: Final = 1_000_000
"""How often the table is searched for requests: it may have thousands of transactions."""


class Balancer:
    """Decides on cuts between supersteps; its caller makes them.

    Args:
        ownership: the intervals.
        computations: the names of those whose keys may be cut.
        clock: the source of time.
        policy: what is hot and what is cold; ``None`` cuts nothing by itself.

    Attributes:
        parallelism: how many tasks run at once; the runner's to set.
        loads: what each interval took; kept only with a policy.
    """

    def __init__(
        self, ownership: Ownership, computations: Sequence[str], clock: Clock, policy: BalancePolicy | None
    ) -> None:
        self._ownership = ownership
        self._computations = computations
        self._clock = clock
        self._policy = policy
        self.parallelism: int = 1
        self.loads: Loads = Loads(1 if policy is None else policy.every)
        self._supersteps = 0
        self._told: set[HotKey] = set()
        self._asked_us: int | None = None

    @property
    def is_on(self) -> bool:
        """Whether load alone calls for cuts."""
        return self._policy is not None

    def note(self, manifests: Iterable[Manifest]) -> None:
        """Take in what a committed superstep reports."""
        if self._policy is not None:
            self._supersteps += 1
            live = [interval for name in self._computations for interval in self._intervals(name)]
            self.loads.note(manifests, live)

    def follow(self, cut: Cut) -> None:
        """Forget what was replaced: what replaces it is looked at again once it has run for as many supersteps as count."""
        self.loads.forget(cut.replaced)

    def follow_update(self, former: Balancer) -> None:
        """Go on from what is known of the intervals that the pipeline had before it changed."""
        self.parallelism, self.loads = former.parallelism, former.loads

    def due(self, txns: Mapping[str, int]) -> Iterator[tuple[Cut, Mapping[str, int]]]:
        """The cuts to make now, each with the positions to record in its commit.

        A request that leaves nothing to cut is answered by a commit of its own.

        Args:
            txns: the transactions of the table, some of which may be requests.
        """
        yield from self._by_hand(txns)
        policy = self._policy
        if policy is None or self._supersteps < policy.every:
            return
        # Once for each time: a run that has nothing to do asks again and again.
        self._supersteps = 0
        for name in self._computations:
            loads = self.loads.of(self._intervals(name))
            if loads is not None:
                self._tell(hot_keys(loads, policy, parallelism=self.parallelism))
                for cut in cuts_for(loads, policy, parallelism=self.parallelism):
                    yield cut, {}

    def report(self) -> Mapping[str, JsonValue]:
        """The loads that the next commit tells readers of the log; nothing but every so many supersteps."""
        policy = self._policy
        if policy is None or self._supersteps + 1 < policy.every:
            return {}
        return {
            interval.app_id: {"work_ms": load.work_ms, "records": load.records, "home": load.home}
            for name in self._computations
            for interval, load in self.loads.so_far(self._intervals(name)).items()
        }

    def _by_hand(self, txns: Mapping[str, int]) -> Iterator[tuple[Cut, Mapping[str, int]]]:
        now_us = self._clock.monotonic_us()
        if self._asked_us is not None and now_us - self._asked_us < _ASKED_EVERY_US:
            return
        self._asked_us = now_us
        for request in waiting_requests(txns):
            intervals = self._intervals(request.computation)
            cut = request.cut(intervals) if intervals else None
            if cut is not None:
                yield cut, request.answer
            elif intervals:
                # Nothing is left to cut: that is an answer too.
                self._ownership.record(request.answer)

    def _intervals(self, computation: str) -> list[Interval]:
        return [owned.interval for owned in self._ownership.of(computation)]

    def _tell(self, keys: Iterable[HotKey]) -> None:
        for hot in set(keys) - self._told:
            self._told.add(hot)
            interval, key = hot
            _LOG.warning(
                "key %r of %s takes more work than an interval should, and one key cannot be split: "
                "combine its records before they come here, or lift its combiner",
                key,
                interval.computation,
            )
