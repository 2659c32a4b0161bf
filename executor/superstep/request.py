"""The commit request of a superstep: the files of every touched interval, positions and counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millpond.executor.ownership.owned_interval import OwnedInterval
from millpond.executor.pipeline.names import DEAD_LETTERS
from millpond.executor.superstep.plan import InputPosition, SuperstepPlan
from millpond.executor.superstep.totals import Totals
from millpond.executor.watermark.pipeline_watermarks import PipelineWatermarks
from millpond.statestore.app_ids import (
    backfill_app_id,
    injected_app_id,
    input_app_id,
    input_rows_app_id,
    superstep_app_id,
)
from millpond.statestore.commit.request import CommitRequest, IntervalWrite
from millpond.statestore.gc_pause import collector_paused
from millpond.statestore.log.action import JsonValue
from millpond.statestore.rows.files import RowFile
from millpond.statestore.types import TIME_MIN_US


@collector_paused()
def superstep_request(
    plan: SuperstepPlan,
    touched: Iterable[tuple[OwnedInterval, RowFile | None]],
    watermarks: PipelineWatermarks,
    *,
    pipeline: str,
    counts: Totals,
    totals: Totals,
    position: InputPosition | None,
    stored: Mapping[str, int],
    loads: Mapping[str, JsonValue] | None = None,
) -> CommitRequest:
    """The commit that makes a superstep durable.

    Args:
        plan: the superstep.
        touched: the intervals, each with the file that it has written, if any.
        watermarks: the pipeline's watermarks, journaled with the commit.
        pipeline: the pipeline's name.
        counts: the superstep's own counts.
        totals: the totals, including the superstep's counts.
        position: how far the outside input has been consumed.
        stored: the positions in the table; unchanged ones are not written again.
        loads: the load of intervals, where it is told with this commit.
    """
    wanted: dict[str, int] = {superstep_app_id(pipeline): plan.superstep}
    offsets: dict[str, str] = {}
    metadata: dict[str, JsonValue] = {
        "pipeline": pipeline,
        "counts": dict(counts.items()),
        "conditions": plan.conditions.to_json(),
    }
    if position is not None and position.backfill is not None:
        wanted[backfill_app_id(pipeline, position.backfill, position.stream)] = position.batch
        metadata["backfill"] = position.backfill
    elif position is not None:
        source = input_app_id(pipeline, position.stream, position.source)
        wanted[source] = position.batch
        if position.offsets is not None:
            offsets[source] = position.offsets
        if position.rows is not None:
            wanted[input_rows_app_id(pipeline, position.stream)] = position.rows
        metadata |= {"input": position.stream, "batch": position.batch}
    if plan.taken:
        metadata["taken"] = [[stream, count] for stream, count in plan.taken]
        for stream, taken in plan.taken:
            injected = injected_app_id(pipeline, stream)
            wanted[injected] = wanted.get(injected, stored.get(injected, 0)) + taken
    if loads:
        metadata["loads"] = dict(loads)
    wanted |= watermarks.positions() | totals.positions(pipeline)
    return CommitRequest(
        kind="superstep",
        writes=tuple(_write_of(owned, file, watermarks) for owned, file in touched),
        positions={
            app_id: version
            for app_id, version in wanted.items()
            if stored.get(app_id) != version and version != TIME_MIN_US
        },
        metadata=metadata,
        source_offsets=offsets,
    )


def _write_of(owned: OwnedInterval, file: RowFile | None, watermarks: PipelineWatermarks) -> IntervalWrite:
    name = owned.interval.computation
    return IntervalWrite(
        interval=owned.interval,
        fence=owned.next_fence,
        added=() if file is None else (file,),
        watermark=None if name == DEAD_LETTERS else watermarks.input_watermark(name),
    )
