"""The plan of a replay: between which versions of the original it lies, and what was consumed in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond.executor.local.row_source import RowSource
from millpond.executor.pipeline.positions import percentile_watermark_app_id, superstep_of
from millpond.executor.pipeline.topology import Topology
from millpond.executor.replay.input_part import InputPart
from millpond.executor.replay.recorded import RecordedSuperstep, consumed_rows, recorded_supersteps
from millpond.statestore.app_ids import injected_app_id, supersteps_of
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import TIME_MAX_US


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """What is to be replayed.

    Attributes:
        first: the original at the version to begin with.
        last: the original at the version to end with.
        supersteps: those in between, oldest first; empty if they are not to be repeated.
        recorded: whether they are to be repeated.
        has_ended: whether all inputs had ended by then.
    """

    first: Snapshot
    last: Snapshot
    supersteps: tuple[RecordedSuperstep, ...]
    recorded: bool
    has_ended: bool

    def parts(
        self, topology: Topology, given: Mapping[str, RowSource], *, since_version: bool
    ) -> dict[str, RowSource]:
        """The parts of the inputs that the original consumed up to the last version.

        Args:
            topology: the pipeline.
            given: the inputs.
            since_version: whether they begin with the first row that the first version had not consumed.

        Raises:
            InvalidError: an input is missing, or has fewer rows than were consumed.
        """
        parts: dict[str, RowSource] = {}
        for stream in topology.injectors:
            begins = consumed_rows(self.first, topology.name, stream)
            ends = consumed_rows(self.last, topology.name, stream)
            if stream not in given and ends > begins:
                raise InvalidError(
                    "the original consumed an input that is not given: give its rows under the stream's name",
                    input=stream,
                    rows=ends - begins,
                )
            if stream not in given:
                continue
            source = given[stream]
            missing = begins if since_version else 0
            # A run counts the rows of bounded inputs alone.
            by_calls = 0 if self.recorded else self.first.txns.get(injected_app_id(topology.name, stream), 0)
            if source.count < ends - missing:
                raise InvalidError(
                    "the input has fewer rows than the original had consumed by then: give all that it was given",
                    input=stream,
                    rows=source.count,
                    consumed=ends - missing,
                    until=self.last.version,
                )
            parts[stream] = InputPart(source, missing - by_calls, ends - by_calls)
        return parts


def plan_replay(
    log: Log, first: Snapshot, last: Snapshot, topology: Topology, *, recorded: bool
) -> ReplayPlan:
    """Plan a replay.

    Args:
        log: the original's log.
        first: the original at the version to begin with.
        last: the original at the version to end with.
        topology: the pipeline.
        recorded: whether the supersteps of the original are to be repeated.

    Raises:
        InvalidError: the versions are in the wrong order, the original has no pipeline of that name, or its log does
            not say how it consumed its inputs.
        DataError: a commit file is damaged.
    """
    if last.version < first.version:
        raise InvalidError(
            "the last version of a replay comes before its first", version=first.version, until=last.version
        )
    pipeline = topology.name
    known = supersteps_of(last.txns)
    if pipeline not in known:
        raise InvalidError(
            "the store has no pipeline of that name: a replay has the name of the original",
            pipeline=pipeline,
            known=", ".join(sorted(known)) or "none",
        )
    ends = [
        last.txns.get(percentile_watermark_app_id(pipeline, "injector", stream)) == TIME_MAX_US
        for stream, node in topology.injectors.items()
        if not node.signals
    ]
    supersteps = tuple(recorded_supersteps(log, first, last.version, pipeline)) if recorded else ()
    if supersteps and supersteps[-1].superstep != superstep_of(last.txns, pipeline):
        raise InvalidError(
            "the log does not name the last superstep", superstep=superstep_of(last.txns, pipeline)
        )
    return ReplayPlan(
        first=first, last=last, supersteps=supersteps, recorded=recorded, has_ended=bool(ends) and all(ends)
    )
