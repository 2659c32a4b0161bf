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
"""Where an injector finds a time, id or member: a column's name, or a function of the row as a ``dict``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectorNode:
    """A declared injector; `Pipeline.inject` explains its arguments.

    Attributes:
        stream: the stream that it feeds, which also names its input for the runners.
        signals: on the stream of signals, which never ends, the names that each windowed step waits for.
        is_assumed: the user gave no watermark policy, so the default is only assumed.
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
        if member is not None and member not in self.members:
            raise InvalidError(
                "no such member is expected", stream=self.stream, member=member, members=list(self.members)
            )
