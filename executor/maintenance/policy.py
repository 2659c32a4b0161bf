"""
When and where a running pipeline compacts its store and collects garbage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

from millpond.executor.event_time.duration import Duration, duration_us
from millpond.gc.compaction_plan import CompactionPolicy
from millpond.gc.round import Retention
from millpond.statestore.errors import InvalidError

__all__ = ["Place", "UpkeepPolicy"]


Place: TypeAlias = Literal["auto", "spark", "process", "thread"]
"""Where compactions are prepared; see `UpkeepPolicy`."""

_EARLY_ROUNDS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepPolicy:
    """
    How a running pipeline keeps its store small.

    Args:
        compaction: when an interval's files become one.
        id_slack: how far behind the low watermark record ids are still known. What it gives up:
            an outside record that comes again after more than that counts again, as a late one.
        retention: how long a version of the table stays readable after it has been replaced;
            savepoints keep theirs for as long as they are open.
        collect_every: after so many versions garbage is collected, and a checkpoint written; after a
            sixteenth of them already when compactions have replaced half as many bytes as are live.
        background: whether compactions are prepared beside the supersteps; without, within `Upkeep.run`.
        place: where compactions are prepared then: ``spark``, each as a Spark job (`SparkRunner` only);
            ``process``, a helper process of this machine, where the store can be opened from there;
            ``thread``, one of this process, which takes turns with the supersteps. ``auto`` is
            ``spark`` where Spark has other machines than the driver's, else ``process``.
    """

    compaction: CompactionPolicy = field(default_factory=CompactionPolicy)
    id_slack: Duration = "3h"
    retention: Duration = "1h"
    collect_every: int = 1_024
    background: bool = True
    place: Place = "auto"

    def __post_init__(self) -> None:
        """
        Refuse an unknown place.
        """
        if self.place not in get_args(Place):
            raise InvalidError("compactions are prepared in auto, spark, process or thread", place=self.place)

    @property
    def id_slack_us(self) -> int:
        """
        The slack in microseconds.
        """
        return duration_us(self.id_slack)

    @property
    def kept(self) -> Retention:
        """
        What collectors leave.
        """
        keep_ms = duration_us(self.retention) // 1_000
        return Retention(keep_ms=keep_ms, checkpoint_every=self.collect_early)

    @property
    def collect_early(self) -> int:
        """
        After so many versions at least garbage is collected, whatever there is of it.
        """
        return max(1, self.collect_every // _EARLY_ROUNDS)
