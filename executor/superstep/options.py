"""Options of a pipeline's coordinator, checked in one place; `RunnerOptions` adds the options of a runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import get_args

from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.ownership.balancer import BalancePolicy
from millpond.executor.superstep.dead_letters import DeadLetterLimit
from millpond.statestore.arguments import check_count, check_flags, check_instance
from millpond.statestore.durations import duration_ms
from millpond.statestore.errors import InvalidError
from millpond.statestore.leases.lease import OnHeld
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """How a process owns a pipeline, admits its input and keeps its store small; `LocalRunner` explains each option."""

    intervals: int | None = None
    has_own_intervals: bool = False  # the number is the caller's, not a default
    accept_checkpoint: bool = False
    accept_ended: bool = False
    pause_timeout: str | timedelta = "5m"
    on_held: OnHeld = "take"
    upkeep: UpkeepPolicy | None = None
    balance: BalancePolicy | None = None
    dead_letter_limit: DeadLetterLimit | None = field(default_factory=DeadLetterLimit)
    clock: Clock = field(default_factory=SystemClock)
    rng: Rng = field(default_factory=SystemRng)

    def __post_init__(self) -> None:
        if self.intervals is not None:
            check_count("intervals", self.intervals)
        check_flags(accept_checkpoint=self.accept_checkpoint, accept_ended=self.accept_ended)
        duration_ms("pause_timeout", self.pause_timeout)
        for name, kind in (
            ("upkeep", UpkeepPolicy),
            ("balance", BalancePolicy),
            ("dead_letter_limit", DeadLetterLimit),
        ):
            check_instance(name, getattr(self, name), kind, optional=True)
        if self.on_held not in get_args(OnHeld):
            raise InvalidError("on_held is take, wait or refuse", on_held=self.on_held)
