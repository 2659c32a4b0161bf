"""Evolution: the changes in a pipeline since the store was written, and whether its rows allow them.

A pipeline's code changes between runs; its rows do not. So before a pipeline opens, its declarations are compared
with the table's records of its computations: which names have rows, the codec, version and parts of the states, the
number of intervals. All of it is in the table (claims and other ``txn`` actions, partitions of live files, rows), so a
lost catalog changes nothing. A mismatch that neither ``renamed_from`` nor ``drop`` explains is refused: to continue
would mean empty state and timers that never fire.

A renamed pipeline moves nothing: input positions, totals, watermarks, fences, dead letters and sink tables keep its
first name, some of them in files and in other tables. The commit that takes its intervals records the new name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from millpond.executor.computation.computation import Computation, codec_of
from millpond.executor.computation.state import StateLayout
from millpond.executor.inputs.positions import (
    claimed_by,
    conflicting_pipeline,
    consumed_streams,
    current_name,
    percentile_watermark_app_id,
    stored_state_version,
)
from millpond.executor.pipeline.nodes import DEAD_LETTERS, SIGNALS, ComputationNode
from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.clocks import EXACT
from millpond.statestore.app_ids import AppId, pipeline_number, recorded_names, recorded_word, supersteps_of
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.rules import CommitRequest, IntervalWrite
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.merge import MERGE_COLUMNS, check_addable, merge_updates
from millpond.statestore.rows.row import has_state, lengths_of
from millpond.statestore.types import Objects
from millpond.statestore.view_columns import fits, state_columns_in, state_word

_LOG = logging.getLogger("millpond")

# The part of a fingerprint that a combining state declares.
_SUMS: Final = "state"
_NOT_ADDABLE: Final = (
    "the CombiningState cannot add to the computation's rows, which are of other code: keep that code, or give this one "
    "another name and drop= the former one in the pipeline"
)
_OTHER_SUMS: Final = (
    "the computation's rows are sums of another CombiningState than the code's: keep the declaration, or give the "
    "computation another name and drop= the former one in the pipeline, or, for code that reads its state, raise "
    "state_version and convert the sums with upgrade_state"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evolution:
    """The computations whose rows move, former name to new name, and those whose rows are removed."""

    renames: Mapping[str, str] = field(default_factory=dict)
    drops: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.renames or self.drops)

    @property
    def leaving(self) -> frozenset[str]:
        return self.drops.union(self.renames)


def plan_evolution(topology: Topology, snapshot: Snapshot, intervals: int | None = None) -> Evolution:
    """Plan the change from the pipeline that wrote the table to the pipeline that opens it.

    ``intervals`` is the runner's number for computations that declare none, if the caller has given one.
    """
    claimed = claimed_by(snapshot.txns, topology.name)
    stored = frozenset(name for name in claimed if snapshot.files_in(name))
    evolution = Evolution(
        renames=dict(_renames(topology, snapshot, stored)), drops=frozenset(topology.drop & stored)
    )
    vanished = sorted(stored - topology.computations.keys() - evolution.leaving - topology.retire)
    if vanished:
        fresh = sorted(topology.computations.keys() - claimed - set(evolution.renames.values()))
        raise InvalidError(
            "the store has rows of a computation that the pipeline no longer has: set renamed_from= in the "
            "computation that takes them over, or in the pipeline drop= to remove them or retire= to keep them",
            pipeline=topology.name,
            computation=vanished[0],
            **({"vanished": vanished} if len(vanished) > 1 else {}),
            **({"new": fresh} if fresh else {}),
        )
    _refuse_renamed_inputs(topology, snapshot, claimed)
    former = {new: old for old, new in evolution.renames.items()}
    for node in topology.computations.values():
        _check_intervals(node, snapshot, former.get(node.name, node.name), intervals)
    return evolution


def _refuse_renamed_inputs(topology: Topology, snapshot: Snapshot, claimed: frozenset[str]) -> None:
    """Refuse a new input of a known computation in place of a former one: it would be read from its start again."""
    # Signals come and go with the windows that listen to them.
    known = consumed_streams(snapshot.txns, topology.name) | {SIGNALS}
    gone = sorted(known - topology.injectors.keys() - topology.retire - {SIGNALS})
    new = sorted(
        name for name in topology.injectors.keys() - known if topology.reached_from([name]) & claimed
    )
    if gone and new:
        raise InvalidError(
            "the store has consumed an input that the pipeline no longer has, and a new one feeds the same computations "
            "from its start: if it is the same under another name, inject it under the former one, because a record "
            "would count again; if it is another, name the former in retire= of the pipeline",
            pipeline=topology.name,
            input=gone[0],
            new=new,
        )


def _renames(topology: Topology, snapshot: Snapshot, stored: frozenset[str]) -> Iterator[tuple[str, str]]:
    for old, new in topology.former_names.items():
        rival = conflicting_pipeline(snapshot.txns, topology.name, old)
        if rival is not None and snapshot.files_in(old) and not snapshot.files_in(new):
            raise InvalidError(
                "the former computation's rows belong to another pipeline of this store: "
                "its name is part of the rename",
                computation=new,
                renamed_from=old,
                pipeline=topology.name,
                belongs_to=rival,
            )
        if old not in stored:
            continue
        if snapshot.files_in(new):
            raise InvalidError(
                "the store has rows under both names: remove renamed_from=, and restore the former computation "
                "or drop= it in the pipeline",
                computation=new,
                renamed_from=old,
            )
        cuts, former_cuts = _cuts(snapshot, new), _cuts(snapshot, old)
        bare, former_bare = (snapshot.txns.get(AppId.BARE_IDS.of(name)) for name in (new, old))
        if (cuts and cuts != former_cuts) or (bare is not None and bare != former_bare):
            raise InvalidError(
                "an earlier computation had this name with different intervals or ids: choose another name",
                computation=new,
                renamed_from=old,
            )
        yield old, new


def _cuts(snapshot: Snapshot, computation: str) -> frozenset[tuple[str, str | None]]:
    return frozenset((interval.low, interval.high) for interval in snapshot.live_intervals(computation))


def number_of_runner(intervals: int) -> str:
    """Return the record of a number that the caller of a runner gave, for computations that declare none."""
    return f"runner-{intervals}"


def _check_intervals(node: ComputationNode, snapshot: Snapshot, name: str, given: int | None) -> None:
    """Refuse a number of intervals that differs from both the stored and the number at the first input."""
    wanted = node.intervals or given
    count = 0 if wanted is None else len(_cuts(snapshot, name))
    if wanted is None or count in (0, wanted):
        return
    recorded = recorded_word(snapshot.txns, AppId.DECLARED_INTERVALS, name)
    if recorded in (str(wanted), number_of_runner(wanted)):
        # The sample had fewer distinct keys than that, or keys were cut since.
        return
    if node.intervals is None and recorded is not None and recorded.isdigit() and int(recorded):
        # The computation declared its own number once, and that stays.
        return
    is_unknown = recorded is None and count < wanted if node.intervals else recorded in (None, "0")
    if is_unknown:
        _LOG.warning(
            "%s is to have intervals=%s, but a run that did not record its number cut its keys into %s; that number stays",
            node.name,
            wanted,
            count,
        )
        return
    raise InvalidError(
        "the computation's keys were cut into another number of intervals at its first input: declare that number "
        "or none; balance= of the runner and `millpond intervals` cut them otherwise",
        computation=node.name,
        intervals=wanted,
        stored=count,
    )


def _with_rows(
    topology: Topology, snapshot: Snapshot, evolution: Evolution
) -> Iterator[tuple[ComputationNode, str]]:
    """Yield the computations that have rows, with the names under which the table has these."""
    former = {new: old for old, new in evolution.renames.items()}
    for node in topology.computations.values():
        name = former.get(node.name, node.name)
        if snapshot.files_in(name):
            yield node, name


def check_states(topology: Topology, snapshot: Snapshot, evolution: Evolution, objects: Objects) -> None:
    for node, name in _with_rows(topology, snapshot, evolution):
        stored, declared = stored_state_version(snapshot.txns, name), node.computation.state_version
        if stored > declared:
            raise InvalidError(
                "newer code has written the computation's states: run that code, or take the store back to a version "
                "before it (`millpond rewind`), or go on from such a version elsewhere (`millpond fork`)",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored < declared and type(node.computation).upgrade_state is Computation.upgrade_state:
            raise InvalidError(
                "the computation's states are of an earlier state_version, and its code has no upgrade_state: give it "
                "one, which returns the state in its new form",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored == declared:
            _check_columns(node, snapshot, name)
            _check_fingerprint(node, snapshot, name, objects)
    check_codecs(topology, snapshot, evolution, objects)


def _check_columns(node: ComputationNode, snapshot: Snapshot, name: str) -> None:
    declared = {column.name: column for column in node.computation.state_columns}
    for column in state_columns_in(snapshot.txns, name):
        now = declared.get(column.name)
        if now is not None and not fits(column, now):
            raise InvalidError(
                "the computation has stored a state variable with another schema: fields may come and go and numbers "
                "become wider, and for anything else the variable needs another name",
                computation=node.name,
                state=column.name,
                stored=state_word([column]),
                declared=state_word([now]),
            )


def _check_fingerprint(node: ComputationNode, snapshot: Snapshot, name: str, objects: Objects) -> None:
    stored, declared = _fingerprint(snapshot, name), node.computation.fingerprint
    if _SUMS in declared and not stored:
        _check_addable(node, snapshot, name, objects)
        return
    if stored is None:
        return
    if _SUMS in {*stored, *declared}:
        # Sums of further fields begin with the first addend.
        changed = [] if stored.items() <= declared.items() else list(dict.fromkeys([*stored, *declared]))
        reason = _OTHER_SUMS
    else:
        changed = _changed(stored, declared)
        reason = (
            f"the step's {'open windows' if stored else 'states'} are those of other code, and would mix with those of "
            "this code: run that code until no window is open, or give this step another name and drop= the former one in the pipeline, or raise "
            "state_version and convert the windows with upgrade_state"
        )
    if changed and _has_states(snapshot, name, objects):
        raise InvalidError(
            reason,
            computation=node.name,
            stored=", ".join(stored[part] for part in changed if part in stored) or "code of your own",
            declared=", ".join(declared[part] for part in changed if part in declared) or "code of your own",
        )


def _fingerprint(snapshot: Snapshot, computation: str) -> dict[str, str] | None:
    word = recorded_word(snapshot.txns, AppId.FINGERPRINT, computation)
    return None if word is None else dict(orjson.loads(word))


def _changed(stored: Mapping[str, str], declared: Mapping[str, str]) -> list[str]:
    """Return the parts that differ; a field of several combiners may come or go, as long as another one stays."""
    former, now = ({part for part in one if "." in part} for one in (stored, declared))
    free = former ^ now if former & now else set()
    parts = dict.fromkeys([*stored, *declared])
    return [part for part in parts if stored.get(part) != declared.get(part) and part not in free]


def _has_states(snapshot: Snapshot, computation: str, objects: Objects) -> bool:
    return any(has_state(rows).any() for rows in _rows(snapshot, computation, objects))


def _check_addable(node: ComputationNode, snapshot: Snapshot, name: str, objects: Objects) -> None:
    """Refuse rows of other code, or of a load, to which a combining state cannot add."""
    addends = StateLayout.of(node.computation).column
    for rows in _rows(snapshot, name, objects):
        try:
            check_addable(rows.filter(pa.array(has_state(rows))), addends)
        except DataError as error:
            reason = error.details.get("reason", error.message)
            raise InvalidError(_NOT_ADDABLE, computation=node.name, reason=reason) from error
        if lengths_of(rows.column("timers").combine_chunks()).any():
            raise InvalidError(_NOT_ADDABLE, computation=node.name, reason="there are timers")


def _rows(snapshot: Snapshot, computation: str, objects: Objects) -> Iterator[pa.Table]:
    for interval in snapshot.live_intervals(computation):
        paths = [file.path for file in snapshot.files_of(interval)]
        yield merge_updates(
            read_row_files(objects, paths, MERGE_COLUMNS, interval=interval, keeps_cells=True)
        )


def new_fingerprints(topology: Topology, snapshot: Snapshot) -> dict[str, int]:
    """Return the positions that record the fingerprints of computations that have none, also where they never ran."""
    return _fingerprint_records(topology, snapshot, has_former=False)


def changed_fingerprints(topology: Topology, snapshot: Snapshot) -> dict[str, int]:
    """Return the positions that record the fingerprints of computations that had another one.

    They must be recorded after the fence: until then the former owner may open a window.
    """
    return _fingerprint_records(topology, snapshot, has_former=True)


def _fingerprint_records(topology: Topology, snapshot: Snapshot, *, has_former: bool) -> dict[str, int]:
    records: dict[str, int] = {}
    known = recorded_names(snapshot.txns, AppId.FINGERPRINT)
    for name, node in topology.computations.items():
        if (name in known) is has_former:
            records |= _fingerprint_record(node, snapshot, name)
    return records


def _fingerprint_record(node: ComputationNode, snapshot: Snapshot, former: str) -> dict[str, int]:
    stored, declared = _fingerprint(snapshot, former), node.computation.fingerprint
    # A field that went may come back while its windows are open, so it stays in the record until none is.
    known = {} if stored is None or _changed(stored, declared) else stored
    word = orjson.dumps({**known, **declared}, option=orjson.OPT_SORT_KEYS).decode()
    is_known = word == recorded_word(snapshot.txns, AppId.FINGERPRINT, node.name)
    return {} if is_known else {AppId.FINGERPRINT.of(node.name, word): snapshot.version + 1}


def check_codecs(topology: Topology, snapshot: Snapshot, evolution: Evolution, objects: Objects) -> None:
    for node, name in _with_rows(topology, snapshot, evolution):
        codec = codec_of(node.computation, stored_state_version(snapshot.txns, name))
        written = recorded_word(snapshot.txns, AppId.CODEC, name)
        # A version that recorded no codec still kept text and bytes in different columns.
        if written is None and (is_text := _is_text(snapshot, name, objects)) is not None:
            written = codec.name if is_text == codec.is_text else "one of text" if is_text else "one of bytes"
        if written not in (None, str(codec.name)):
            raise InvalidError(
                "the computation's states were written by another codec: keep that codec, or raise state_version and "
                "name it in codecs, or start a computation of another name and drop= this one in the pipeline",
                computation=node.name,
                codec=codec.name,
                written_by=written,
            )


def _is_text(snapshot: Snapshot, computation: str, objects: Objects) -> bool | None:
    for file in reversed(snapshot.files_in(computation)):
        rows = read_row_files(objects, [file.path], ["state", "state_bytes"])
        if pc.any(rows.column("state").is_valid()).as_py():
            return True
        if pc.any(rows.column("state_bytes").is_valid()).as_py():
            return False
    return None


def state_records(topology: Topology, snapshot: Snapshot, names: frozenset[str]) -> dict[str, int]:
    """Return the new positions that record codecs, versions, parts and fingerprints of states, and the pipeline's name."""
    records: dict[str, int] = {}
    known, version = sorted(names & topology.computations.keys()), snapshot.version + 1
    for name in known:
        codec = str(topology.computations[name].computation.codec.name)
        if recorded_word(snapshot.txns, AppId.CODEC, name) != codec:
            records[AppId.CODEC.of(name, codec)] = version
    current = current_name(snapshot.txns, topology.name)
    if current not in (topology.title, topology.renamed_from):
        raise InvalidError(
            "another process has renamed the pipeline meanwhile",
            pipeline=topology.title,
            former=topology.name,
            now=current,
        )
    if current != topology.title:
        records[AppId.PIPELINE_NAME.of(topology.name, topology.title)] = version
    for name in known:
        code = topology.computations[name].computation
        if stored_state_version(snapshot.txns, name) != code.state_version:
            records[AppId.STATE_VERSION.of(name, code.state_version)] = version
            records |= _fingerprint_record(topology.computations[name], snapshot, name)
        if state_columns_in(snapshot.txns, name) != code.state_columns:
            records[AppId.STATE_COLUMNS.of(name, state_word(code.state_columns))] = version
    return records


def _moved(topology: Topology, snapshot: Snapshot, old: str, new: str) -> dict[str, int]:
    pipeline, txns = topology.name, snapshot.txns
    pairs = {
        percentile_watermark_app_id(pipeline, "computation", old, percentile): percentile_watermark_app_id(
            pipeline, "computation", new, percentile
        )
        for percentile in (EXACT, *topology.percentiles)
    }
    pairs[AppId.BARE_IDS.of(old)] = AppId.BARE_IDS.of(new)
    for app_id in txns:
        for kind in (AppId.COUNT, AppId.BACKFILL):
            if app_id.startswith(kind):
                of, computation, last = kind.parts(app_id)
                if (of, computation) == (pipeline, old):
                    pairs[app_id] = kind.of(pipeline, new, last)
    # Everything that belongs to the rows moves with them, otherwise the computation would start from nothing.
    moved = {target: txns[source] for source, target in pairs.items() if source in txns}
    moved[AppId.CLAIM.of(new)] = pipeline_number(pipeline)
    # The codec and version of future rows: `check_states` has checked that they read the moved ones.
    code = topology.computations[new].computation
    if recorded_word(txns, AppId.CODEC, old) is not None:
        moved[AppId.CODEC.of(new, str(code.codec.name))] = snapshot.version + 1
    if stored_state_version(txns, new) != code.state_version:
        moved[AppId.STATE_VERSION.of(new, code.state_version)] = snapshot.version + 1
    if recorded_word(txns, AppId.FINGERPRINT, old) is not None:
        moved |= _fingerprint_record(topology.computations[new], snapshot, old)
    # A record of columns also if there are none now, because it tells views that the rows may have states in columns.
    columns = state_word(code.state_columns)
    words = {kind: recorded_word(txns, kind, old) for kind in (AppId.KEY_COLUMNS, AppId.DECLARED_INTERVALS)}
    words[AppId.STATE_COLUMNS] = recorded_word(txns, AppId.STATE_COLUMNS, old) and columns
    moved |= {kind.of(new, word): snapshot.version + 1 for kind, word in words.items() if word is not None}
    return moved


def evolution_request(
    topology: Topology, snapshot: Snapshot, evolution: Evolution, writes: Iterable[IntervalWrite]
) -> CommitRequest:
    """Return the commit that moves or removes the rows of computations that the pipeline no longer has."""
    moved: dict[str, int] = {}
    for old, new in evolution.renames.items():
        moved |= _moved(topology, snapshot, old, new)
    stored = snapshot.txns
    return CommitRequest(
        kind="evolution",
        writes=tuple(writes),
        # A reused name may already have a higher position, and positions never go back.
        positions={app_id: max(version, stored.get(app_id, version)) for app_id, version in moved.items()},
        metadata={
            "pipeline": topology.name,
            "renamed": dict(evolution.renames),
            "dropped": sorted(evolution.drops),
        },
        renames=evolution.renames,
        drops=evolution.drops,
    )


def intervals_of(snapshot: Snapshot, computations: frozenset[str]) -> list[Interval]:
    return [interval for interval in snapshot.live_intervals() if interval.computation in computations]


def as_stored(topology: Topology, snapshot: Snapshot) -> Topology:
    """Return the pipeline under the name by which the store knows it, if any."""
    # The stored names of the pipelines that have run in the store, or at least opened.
    opened = (interval.low.removesuffix("/") for interval in snapshot.live_intervals(DEAD_LETTERS))
    stored = frozenset([*supersteps_of(snapshot.txns), *opened])
    by_name = {current_name(snapshot.txns, pipeline): pipeline for pipeline in stored}
    name, former = topology.title, topology.renamed_from
    if name in by_name:
        if former in by_name:
            raise InvalidError(
                "the store has a pipeline under either name: remove renamed_from= to go on with this one",
                pipeline=name,
                renamed_from=former,
            )
        return replace(topology, name=by_name[name], declared_name=name)
    if former in by_name:
        return replace(topology, name=by_name[former], declared_name=name)
    for other in (former, name):
        if other in stored:
            raise InvalidError(
                "the pipeline that had this name in the store has another one by now: use that, or say it in "
                "renamed_from= of the pipeline",
                pipeline=name,
                former=other,
                now=current_name(snapshot.txns, other),
            )
    return topology
