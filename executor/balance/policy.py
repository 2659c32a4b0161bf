"""When the keys of a computation are cut again while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.statestore.errors import InvalidError


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancePolicy:
    """When intervals are split and merged, by what their bundles take (MillWheel §7.1).

    The fair share of an interval is its computation's work divided by the number of intervals, or by the number of
    tasks that run at once if that is greater. Between ``hot`` and ``cold`` nothing happens, so a cut does not
    call for the next one.

    Args:
        every: supersteps between two looks at the load; what counts is the median of that many.
        hot: an interval with more than this many fair shares is split into parts of about one.
        cold: neighbours that have less than this part of a fair share together are merged.
        least_ms: a computation that takes less work a superstep than this, in milliseconds, is left alone.
        intervals_max: the most intervals of a computation; ``None``: eight times the tasks that run at once.

    Raises:
        InvalidError: under these bounds a cut would call for the opposite one.

    Example:
        ``mp.SparkRunner(store, balance=mp.BalancePolicy(hot=3.0))``
    """

    every: int = 4
    hot: float = 2.0
    cold: float = 0.25
    least_ms: float = 50.0
    intervals_max: int | None = None

    def __post_init__(self) -> None:
        """Refuse bounds without a gap between hot and cold."""
        if self.every < 1 or not 0 <= self.cold <= 0.5 or self.hot < 1.5 or self.least_ms < 0:
            raise InvalidError("a balancer cannot work with these bounds", policy=self)
        if self.intervals_max is not None and self.intervals_max < 1:
            raise InvalidError("a computation has at least one interval", intervals_max=self.intervals_max)
