"""The arithmetic of a large pipeline: bytes, log entries, objects and nodes, by the code that writes them.

Nothing runs. The code of a pipeline makes the parts of a thousand intervals in a plan, a report, a log entry, a
checkpoint and ZooKeeper; their mean lengths are multiplied. ``docs/scale.md`` shows the result.

    python -m benchmarks.scale_arithmetic --intervals 1000 --executors 100 --seconds 1,10,60
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

import click

from benchmarks.json_result import tell_result
from benchmarks.numbers import numbers
from millpond.executor.interval.bundle import BundleStatistics, IntervalPlan
from millpond.executor.interval.row_update import BundleResult, Manifest, PendingWork
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.spark.task_plan import SlotReport, pack_parts
from millpond.executor.superstep.delivery import ProductionSource
from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.leases.lease import Holder
from millpond.statestore.leases.zookeeper_lease import IntervalNodes, StorePaths, batches, taking
from millpond.statestore.leases.zookeeper_session import Create
from millpond.statestore.log.action import Action, Add, CommitInfo, JsonValue, Remove, Txn
from millpond.statestore.log.checkpoint import write_part
from millpond.statestore.log.commit_file import encode
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.rows.files import RowFile, row_file_path
from millpond.statestore.rows.row import Fence, pack_fence
from millpond.statestore.system import SystemRng
from millpond.statestore.types import CommitNumber, EventTimeMicros, Sequencer, Superstep, TableVersion

COMPACTED_AT_ONCE: Final = 32
"""How many compactions one commit takes, and one commit of them follows a superstep at most."""

_SAMPLE: Final = 1_000
_DAY_S: Final = 86_400
_AT = EventTimeMicros(1_800_000_000_000_000)
_FENCE: Final = Fence(Sequencer(3), CommitNumber(1_000_000))
_SHARED_NODES: Final = 3
"""The store's node, that of its leases, and the high-water mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of the part of one interval or one file.

    Attributes:
        plan_interval: an interval in the plan, without its files.
        plan_file: one of its files in the plan.
        plan_source: a file with undelivered productions, in the plan of each task.
        report: an interval in a task's report.
        log_add: a new file in a log entry.
        log_txn: a fence in a log entry.
        log_watermark: a journaled watermark in a log entry.
        log_remove: a replaced file in a log entry.
        checkpoint_add: a live file in a checkpoint.
        checkpoint_txn: a fence in a checkpoint.
        checkpoint_remove: a replaced file that is still there, in a checkpoint.
        zookeeper: paths and data of an interval's nodes.
    """

    plan_interval: float
    plan_file: float
    plan_source: float
    report: float
    log_add: float
    log_txn: float
    log_watermark: float
    log_remove: float
    checkpoint_add: float
    checkpoint_txn: float
    checkpoint_remove: float
    zookeeper: float

    @property
    def log_entry(self) -> float:
        """An interval's part of a superstep's log entry."""
        return self.log_add + self.log_txn + self.log_watermark


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A pipeline whose intervals all have work in each superstep.

    Attributes:
        intervals: how many.
        executors: how many are sent the plan.
        files: live files of an interval.
        seconds: how long a superstep takes.
        upkeep: how its store is kept small.
    """

    intervals: int = 1_000
    executors: int = 100
    files: int = 24
    seconds: float = 10.0
    upkeep: UpkeepPolicy = field(default_factory=UpkeepPolicy)


def measure_sizes() -> Sizes:
    """The mean lengths over a thousand intervals, cut at keys of 12 characters."""
    intervals = intervals_from_boundaries("visits", [f"key-{number:08d}" for number in range(1, _SAMPLE)])
    files = [_row_file(interval) for interval in intervals]
    adds = [_add(interval, file) for interval, file in zip(intervals, files, strict=True)]
    txns = [
        Txn(
            app_id=one.app_id,
            version=pack_fence(_FENCE.sequencer, _FENCE.commit_number),
            updated_ms=_AT // 1_000,
        )
        for one in intervals
    ]
    removes = [_remove(add) for add in adds]
    live = [LiveFile.from_add(add, TableVersion(0)) for add in adds]
    bare = [_plan(interval) for interval in intervals]
    with_one = [replace(part, files=(file,)) for part, file in zip(bare, live, strict=True)]
    with_two = [
        replace(part, files=(file, other))
        for part, file, other in zip(bare, live, live[1:] + live[:1], strict=True)
    ]
    plan_bytes, one_bytes, two_bytes = (_packed(parts) for parts in (bare, with_one, with_two))
    return Sizes(
        plan_interval=plan_bytes,
        plan_file=two_bytes - one_bytes,
        plan_source=len(pickle.dumps(tuple(map(_source, files)))) / _SAMPLE,
        report=_mean([_report(interval, file) for interval, file in zip(intervals, files, strict=True)]),
        log_add=_in_log(adds),
        log_txn=_in_log(txns),
        log_watermark=_in_log([_watermarks(intervals)]),
        log_remove=_in_log(removes),
        checkpoint_add=_in_checkpoint(adds),
        checkpoint_txn=_in_checkpoint(txns),
        checkpoint_remove=_in_checkpoint(removes),
        zookeeper=_mean(map(_nodes, intervals)),
    )


def multiply(load: Load, sizes: Sizes) -> dict[str, int]:
    """What the pipeline sends, writes and keeps.

    Args:
        load: the pipeline.
        sizes: the parts.

    Returns:
        Bytes of a superstep (``plan``, ``plan_to_all``, ``reports``, ``commit``, ``upkeep``), of a day's log and of a
        checkpoint; log entries and new files of a day; objects that a collector finds at most; ZooKeeper's nodes.
    """
    count, upkeep = load.intervals, load.upkeep
    compactions = min(COMPACTED_AT_ONCE, count / upkeep.compaction.fan_in)
    # In the long run as many files are replaced as are written.
    replaced = count + compactions
    entry_bytes = count * sizes.log_entry
    upkeep_bytes = replaced * sizes.log_remove + compactions * (sizes.log_add + sizes.log_txn)
    plan_bytes = count * (sizes.plan_interval + load.files * sizes.plan_file)
    supersteps = _DAY_S / load.seconds
    # A round comes after so many versions, two per superstep, and collects everything older than the retention.
    kept = upkeep.kept.keep_ms / 1_000 / load.seconds + upkeep.collect_every / 2
    live, garbage = count * load.files, kept * replaced
    intervals = intervals_from_boundaries("visits", [f"key-{n:08d}" for n in range(1, count)])
    figures = {
        "plan_bytes": plan_bytes,
        "plan_to_all_bytes": plan_bytes * load.executors,
        "reports_bytes": count * sizes.report,
        "commit_bytes": entry_bytes,
        "upkeep_bytes": upkeep_bytes,
        "compactions": compactions,
        "files_per_compaction": replaced / compactions,
        "log_entries_a_day": 2 * supersteps,
        "log_bytes_a_day": supersteps * (entry_bytes + upkeep_bytes),
        "log_entries_kept": 2 * kept,
        "log_bytes_kept": kept * (entry_bytes + upkeep_bytes),
        "files_a_day": supersteps * (count + compactions),
        "live_files": live,
        "objects_listed": live + garbage + 2 * kept,
        "checkpoint_bytes": live * sizes.checkpoint_add
        + count * sizes.checkpoint_txn
        + garbage * sizes.checkpoint_remove,
        # The driver's own interval has nodes, too.
        "zookeeper_nodes": 2 * (count + 1) + _SHARED_NODES,
        "zookeeper_watches": 2 * (count + 1),
        "zookeeper_bytes": (count + 1) * sizes.zookeeper,
        "zookeeper_transactions_to_take_over": sum(
            1 for _ in batches(dict.fromkeys(intervals, Sequencer(1)))
        ),
    }
    return {name: round(figure) for name, figure in figures.items()}


def _row_file(interval: Interval) -> RowFile:
    key = interval.low or "key-00000000"
    return RowFile(
        path=row_file_path(interval.computation, Superstep(_FENCE.commit_number), SystemRng().token()),
        size_bytes=1_000_000,
        rows=1_000,
        min_key=key,
        max_key=key,
        superstep=Superstep(_FENCE.commit_number),
        sequencer=_FENCE.sequencer,
        commit_number=_FENCE.commit_number,
        productions=0,
    )


def _add(interval: Interval, file: RowFile) -> Add:
    version = TableVersion(2 * _FENCE.commit_number)
    return row_file_to_add(file, interval, version=version, modification_time_ms=_AT // 1_000)


def _remove(add: Add) -> Remove:
    return Remove(
        path=add.path,
        deletion_time_ms=_AT // 1_000,
        data_change=False,
        partition_values=add.partition_values,
        size_bytes=add.size_bytes,
    )


def _plan(interval: Interval) -> IntervalPlan:
    return IntervalPlan(interval=interval, fence=_FENCE, watermark=_AT, files=(), due=False)


def _source(file: RowFile) -> ProductionSource:
    return ProductionSource(path=file.path, superstep=file.superstep, streams=frozenset(("sessions",)))


def _report(interval: Interval, file: RowFile) -> bytes:
    statistics = BundleStatistics(records=1_000, keys=1_000)
    result = BundleResult(
        updates=None, statistics=statistics, pending=PendingWork(next_event_timer=_AT, hold=_AT)
    )
    manifest = Manifest(interval=interval, fence=_FENCE, file=file, result=result)
    return pickle.dumps(SlotReport(slot=0, manifests=(manifest,), process="process"))


def _watermarks(intervals: Sequence[Interval]) -> CommitInfo:
    watermarks: dict[str, JsonValue] = {interval.app_id: int(_AT) for interval in intervals}
    return CommitInfo(operation="", timestamp_ms=0, millpond={"watermarks": watermarks})


def _nodes(interval: Interval) -> bytes:
    holder = Holder(writer_id=SystemRng().token(), host="driver.example.com", process_id=12_345)
    unknown = IntervalNodes(interval=interval, node=None, owner=None)
    _, operations = taking(unknown, Sequencer(1), holder, StorePaths(SystemRng().token()))
    created = [one for one in operations if isinstance(one, Create)]
    return b"".join(one.path.encode() + one.data for one in created)


def _packed(parts: Sequence[IntervalPlan]) -> float:
    """With a slot for each interval, as where there are as many executors as intervals."""
    return _mean(pack_parts(dict(enumerate(parts)), len(parts)).values())


def _in_log(actions: Sequence[Action]) -> float:
    return len(encode(actions)) / _SAMPLE


def _in_checkpoint(actions: Sequence[Action]) -> float:
    return len(write_part(actions, "_delta_log/1.checkpoint.parquet")) / _SAMPLE


def _mean(packed: Iterable[bytes]) -> float:
    lengths = [len(one) for one in packed]
    return sum(lengths) / len(lengths)


@click.command(help=__doc__)
@click.option("--intervals", default=1_000, show_default=True)
@click.option("--executors", default=100, show_default=True)
@click.option("--files", default=24, show_default=True, help="Live files of an interval.")
@click.option(
    "--seconds", default="1,10,60", callback=numbers(float), show_default=True, help="Of a superstep."
)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(intervals: int, executors: int, files: int, seconds: list[float], path: Path | None) -> None:
    """Multiply."""
    sizes = measure_sizes()
    loads = [Load(intervals=intervals, executors=executors, files=files, seconds=one) for one in seconds]
    results = {f"{load.seconds:g} s": multiply(load, sizes) for load in loads}
    each = {name: round(size, 1) for name, size in asdict(sizes).items()}
    tell_result({"bytes_each": each, "supersteps_of": results}, path, indent=2)


if __name__ == "__main__":
    main()
