"""Conditions: what the outside told a superstep, apart from its records.

They are part of each superstep's commit. With them, and the same records, a replay runs the superstep as it was: at
the same wall time, under the same watermarks of its inputs, whatever clocks, silence and callers had to do with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from millpond.executor.event_time.clocks import PercentileTimes
from millpond.statestore.errors import DataError
from millpond.statestore.types import EventTimeMicros, WallTimeMicros

if TYPE_CHECKING:
    from millpond.statestore.log.action import JsonValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a superstep met.

    Attributes:
        wall_time: when it was planned.
        watermarks: by injected stream, its watermarks by percentile, that of 100 among them.
        idle: the injected streams that were idle.
        stamps: by injected stream, the event time that records of it got if they carry none.
    """

    wall_time: WallTimeMicros
    watermarks: Mapping[str, PercentileTimes] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    stamps: Mapping[str, EventTimeMicros] = field(default_factory=dict)

    def stamped(self, stamps: Mapping[str, EventTimeMicros | None]) -> Conditions:
        """The same with the stamps of arrival, ``None`` for records that carry their own time."""
        return replace(self, stamps={stream: at for stream, at in stamps.items() if at is not None})

    def to_json(self) -> dict[str, JsonValue]:
        """The form that a commit has.

        Example:
            >>> Conditions(wall_time=5, watermarks={"clicks": {100.0: 3}}).to_json()
            {'wall_time': 5, 'watermarks': {'clicks': {'100.0': 3}}}
        """
        fields: dict[str, JsonValue] = {
            "wall_time": self.wall_time,
            "watermarks": {
                stream: {repr(percentile): int(at) for percentile, at in marks.items()}
                for stream, marks in self.watermarks.items()
            },
        }
        if self.idle:
            fields["idle"] = list(self.idle)
        if self.stamps:
            fields["stamps"] = {stream: int(at) for stream, at in self.stamps.items()}
        return fields

    @staticmethod
    def from_json(fields: Any) -> Conditions:
        """Read what `to_json` gave.

        Raises:
            DataError: it is something else.
        """
        try:
            return Conditions(
                wall_time=WallTimeMicros(fields["wall_time"]),
                watermarks={
                    stream: {float(percentile): EventTimeMicros(at) for percentile, at in marks.items()}
                    for stream, marks in fields["watermarks"].items()
                },
                idle=tuple(fields.get("idle", ())),
                stamps={stream: EventTimeMicros(at) for stream, at in fields.get("stamps", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                "a commit does not say under which conditions its superstep ran", cause=error
            ) from error
