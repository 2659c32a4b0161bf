"""A declared injector: how outside rows become records of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from millpond.executor.inputs.keys import KeyField
from millpond.executor.inputs.payload import Payload
from millpond.executor.time.instants import DEFAULT_READING, TimeReading
from millpond.executor.time.watermark_policies import IngressTime, WatermarkPolicy
from millpond.statestore.errors import InvalidError
from millpond.statestore.rows.record_ids import ID_SLACK_US

FieldExtractor: TypeAlias = str | Callable[[Any], Any]
"""How an injector reads a key, time or id: a column's name, or a function of the row as a ``dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorNode:
    """A declared injector; `Pipeline.inject` explains its arguments.

    Attributes:
        stream: the stream that it feeds, which also names its input for the runners.
        key: where a record's key is: a column, a tuple of columns, or a function.
        at: where its event time is (microseconds, a time with a zone, or ISO text), or the time of arrival.
        id: where the publisher's id is; ``None`` without ids.
        watermark: how the low watermark follows from the records.
        idle_after_us: the silence after which the stream no longer holds the watermark; ``None``: never.
        members: the expected senders; the watermark is the least of theirs.
        member: where the sender of a record is.
        skew_limit_us: how far its watermark may run ahead of the slowest computation; ``None``: no limit.
        id_slack_us: how long a sender may repeat a record.
        times: how times are read that do not say their unit or zone.
        signals: of the stream of signals, the names that each windowed step waits for; empty for all others.
            The stream of signals never ends and holds no watermark back.
        change: the column that says what kind of change a row is; ``None``: each row is an element.
        payload: what decodes the values out of a column; ``None``: the row is the value.
        is_assumed: whether nothing was said of the watermark, so that the policy is only assumed.
    """

    stream: str
    key: KeyField
    at: FieldExtractor | IngressTime
    id: FieldExtractor | None
    watermark: WatermarkPolicy
    idle_after_us: int | None = None
    members: tuple[str, ...] = ()
    member: FieldExtractor | None = None
    skew_limit_us: int | None = None
    id_slack_us: int = ID_SLACK_US
    times: TimeReading = DEFAULT_READING
    signals: Mapping[str, frozenset[str]] = field(default_factory=dict)
    change: str | None = None
    payload: Payload | None = None
    is_assumed: bool = False

    def check_member(self, member: str | None) -> None:
        """Refuse an unknown member.

        Raises:
            InvalidError: names it.
        """
        if member is not None and member not in self.members:
            raise InvalidError(
                "no such member is expected", stream=self.stream, member=member, members=list(self.members)
            )
