"""``millpond intervals``: the key intervals of a store, their load, and requests to cut them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from millpond.cli.terminal.cli_help import command
from millpond.cli.terminal.opening import StoreAt, store_argument, zookeeper_options
from millpond.cli.terminal.options import json_option, option
from millpond.cli.terminal.output import note, print_json, print_rows, say, size_text
from millpond.executor.ownership.cuts import CutKind, CutRequest, waiting_requests
from millpond.executor.pipeline.nodes import DEAD_LETTERS
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.replayed_log import newest_commits
from millpond.statestore.interval import Interval
from millpond.statestore.log.rules import CommitRequest
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.visible import visible

# Commits searched for load reports; a pipeline that balances its load writes a report every few supersteps.
_COMMITS_MAX: Final = 64
_OWNER_DIGITS: Final = 8


@command(
    "millpond intervals pond",
    "millpond intervals pond --split window_counter EWR",
    "millpond intervals pond --merge window_counter JFK",
    "millpond intervals pond --json | jq 'select(.work_ms > 100)'",
)
@store_argument
@option("--split", "Split the interval that has KEY, in front of it.", nargs=2, metavar="COMPUTATION KEY")
@option("--merge", "Merge the two intervals that meet at KEY.", nargs=2, metavar="COMPUTATION KEY")
@zookeeper_options
@json_option("One JSON object per interval, or per cut that is asked for, one per line.")
def intervals(
    store: StoreAt, split: tuple[str, str] | None, merge: tuple[str, str] | None, *, as_json: bool
) -> None:
    """Show the key intervals of STORE, or ask its pipeline to cut its keys differently.

    For each interval: the row updates and bytes of its own files, and how many files it shares with
    neighbours after a split (they are parted as the pipeline compacts); the milliseconds and records of
    a superstep, as the pipeline last reported them, if it balances its load; the sequencer of its lease, the
    writer that owns it and, on Spark, the process that its soft state is in.

    Intervals are split and merged by load where the runner has a `balance=` policy. --split and --merge request
    a cut: the pipeline makes it after one of its next supersteps or, if it is stopped, when it
    runs again. Rows, timers, record ids and watermarks do not change.
    """
    given: tuple[tuple[CutKind, tuple[str, str] | None], ...] = (("split", split), ("merge", merge))
    wanted = [(kind, cut) for kind, cut in given if cut]
    if wanted:
        with store.to_write() as opened:
            asked = [_ask(opened, kind, computation, key) for kind, (computation, key) in wanted]
        if as_json:
            print_json(map(asdict, asked))
        for request in () if as_json else asked:
            say(
                f"asked for: {request.kind} {request.computation} at {visible(request.key)}; the pipeline does it after one of "
                "its next supersteps"
            )
        return
    with store.to_read() as opened:
        snapshot = opened.snapshot()
        loads, owner = _reported(opened, snapshot)
        entries = [
            _entry(snapshot, interval, fence, loads.get(interval.app_id, {}), owner)
            for interval, fence in snapshot.live_intervals().items()
            if interval.computation != DEAD_LETTERS
        ]
        waiting = waiting_requests(snapshot.txns)
    columns = ("computation", "from", "to", "rows", "bytes", "shared", "ms", "records", "lease")
    print_rows(entries, (*columns, "owner", "home"), map(_row, entries), as_json=as_json)
    for request in () if as_json else waiting:
        note(f"waits for the pipeline: {request.kind} {request.computation} {request.key}")


def _ask(store: Store, kind: CutKind, computation: str, key: str) -> CutRequest:
    snapshot = store.committer.refresh()
    live = list(snapshot.live_intervals(computation))
    if not live or computation == DEAD_LETTERS:
        known = sorted({one.computation for one in snapshot.live_intervals()} - {DEAD_LETTERS})
        raise InvalidError(
            "the store has no computation of this name whose keys are cut",
            computation=computation,
            known=", ".join(known) or "none",
        )
    request = CutRequest.next(snapshot.txns, computation, kind, key)
    if request.cut(live) is None:
        raise InvalidError(
            "an interval begins at this key already"
            if kind == "split"
            else "no two intervals meet at this key",
            computation=computation,
            key=key,
            bounds=", ".join(repr(interval.low) for interval in live[1:]) or "none",
        )
    store.committer.commit(CommitRequest(kind="request", positions={request.app_id: request.number}))
    return request


def _reported(store: Store, snapshot: Snapshot) -> tuple[Mapping[str, Mapping[str, object]], str | None]:
    """Return the newest loads by interval, and the writer of the newest superstep."""
    loads: dict[str, Mapping[str, object]] = {}
    owner: str | None = None
    for facts in newest_commits(store.log, snapshot.version, _COMMITS_MAX):
        if owner is None and facts.metadata.get("kind") in {"superstep", "fence"}:
            owner = str(facts.metadata.get("writer", "")) or None
        reported = facts.metadata.get("loads")
        if isinstance(reported, Mapping):
            loads = {**reported, **loads}
    return loads, owner


def _entry(
    snapshot: Snapshot, interval: Interval, fence: Fence, load: Mapping[str, object], owner: str | None
) -> dict[str, Any]:
    """Return one interval with the fields that the command prints, in their order."""
    files = snapshot.files_of(interval)
    own = [file for file in files if file.lies_in(interval)]
    work_ms, records = load.get("work_ms"), load.get("records")
    return {
        "computation": interval.computation,
        "low": interval.low,
        "high": interval.high,
        "row_updates": sum(file.num_records or 0 for file in own),
        "size_bytes": sum(file.size_bytes for file in own),
        "shared_files": len(files) - len(own),
        "work_ms": float(work_ms) if isinstance(work_ms, int | float) else None,
        "records": float(records) if isinstance(records, int | float) else None,
        "sequencer": fence.sequencer,
        "owner": owner,
        "home": str(load["home"]) if load.get("home") else None,
    }


def _row(entry: Mapping[str, Any]) -> tuple[object, ...]:
    work_ms = entry["work_ms"]
    shown = {"size_bytes": size_text(entry["size_bytes"]), "owner": (entry["owner"] or "")[:_OWNER_DIGITS]}
    shown["work_ms"] = None if work_ms is None else round(work_ms, 1)
    return tuple({**entry, **shown}.values())
