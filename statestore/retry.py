"""Bounded retries with growing, jittered waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from millpond.statestore.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from millpond.statestore.types import Clock, Rng

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often an operation is tried, and how long to wait between tries.

    Args:
        tries: attempts at one operation of the object store.
        delay_ms: wait before the second attempt; it doubles with every attempt.
        delay_ms_max: the longest wait.
        versions_max: how many versions a commit may lose to other writers before it gives up.
    """

    tries: int = 5
    delay_ms: float = 10.0
    delay_ms_max: float = 1_000.0
    versions_max: int = 100


def retrying(action: Callable[[], _Result], policy: RetryPolicy, clock: Clock, rng: Rng) -> _Result:
    """Run ``action`` and return its result, retrying while the store is unavailable.

    Use it only for idempotent actions: reads, and put-if-absent of the same bytes.

    Raises:
        UnavailableError: every attempt raised it.
    """
    delay_ms = policy.delay_ms
    for _ in range(policy.tries - 1):
        try:
            return action()
        except UnavailableError:
            clock.sleep_ms(delay_ms * (0.5 + rng.random() / 2))
            delay_ms = min(delay_ms * 2, policy.delay_ms_max)
    return action()
