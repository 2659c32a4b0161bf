"""When and where a running pipeline compacts its store and collects garbage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.gc.compaction_plan import CompactionPolicy
from millpond.gc.round import Retention
from millpond.statestore.errors import InvalidError

Place: TypeAlias = Literal["auto", "spark", "process", "thread"]
"""Where compactions are prepared; see `UpkeepPolicy`."""

_EARLY_ROUNDS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepPolicy:
    """When and where a running pipeline compacts its store and collects garbage (MillWheel §6.1.1).

    Args:
        compaction: when the files of an interval are merged.
        retention: how long a replaced version of the table stays readable, as a duration. Savepoints
            keep their versions for as long as they are open.
        collect_every: the number of versions between two garbage collections, each of which writes a
            checkpoint. Collection starts after a sixteenth of that number if compactions have
            replaced half as many bytes as are live, and every sixth of ``retention`` while an
            eighth of the live bytes waits to be deleted.
        background: whether compactions are prepared in parallel with supersteps; if not, they are
            prepared between supersteps.
        place: where compactions are prepared in the background. ``"spark"`` runs each as a Spark job
            (`SparkRunner` only). ``"process"`` uses a helper process on this machine, if that can open
            the store. ``"thread"`` uses a thread of this process, which competes with the supersteps for
            the interpreter. ``"auto"`` is ``"spark"`` if Spark has machines other than the driver's,
            else ``"process"``.

    Raises:
        InvalidError: ``place`` is unknown, or ``retention`` or ``collect_every`` is too small.

    Example:
        ``mp.LocalRunner(store, upkeep=mp.UpkeepPolicy(retention="6h", collect_every=4_096))``
    """

    compaction: CompactionPolicy = field(default_factory=CompactionPolicy)
    retention: Duration = "1h"
    collect_every: int = 1_024
    background: bool = True
    place: Place = "auto"

    def __post_init__(self) -> None:
        """Refuse an unknown ``place``, and bounds that are too small."""
        keep_us = duration_us(self.retention)
        if keep_us < 0 or self.collect_every < 1:
            raise InvalidError(
                "an upkeep's bounds are too small: retention is at least 0s, collect_every at least 1",
                retention=self.retention,
                collect_every=self.collect_every,
            )
        if self.place not in get_args(Place):
            raise InvalidError("compactions are prepared in auto, spark, process or thread", place=self.place)

    @property
    def kept(self) -> Retention:
        """What garbage collection keeps."""
        keep_ms = duration_us(self.retention) // 1_000
        return Retention(keep_ms=keep_ms, checkpoint_every=self.collect_early)

    @property
    def collect_early(self) -> int:
        """The number of versions after which garbage is collected early."""
        return max(1, self.collect_every // _EARLY_ROUNDS)
