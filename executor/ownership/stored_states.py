"""What the table records of how states were written: their codec, version and parts, and whether today's code reads them."""

from __future__ import annotations

from typing import Final

from millpond.executor.computation.computation import Computation
from millpond.executor.ownership.evolution import Evolution, check_codecs, codec_records
from millpond.executor.ownership.pipeline_names import name_records
from millpond.executor.pipeline.nodes import ComputationNode
from millpond.executor.pipeline.positions import stored_state_version
from millpond.executor.pipeline.topology import Topology
from millpond.statestore.app_ids import state_columns_app_id, state_version_app_id
from millpond.statestore.errors import InvalidError
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Objects
from millpond.statestore.views.state_columns import fits, state_columns_in, state_word

_DEFAULT: Final = Computation.upgrade_state


def check_states(topology: Topology, snapshot: Snapshot, evolution: Evolution, objects: Objects) -> None:
    """Refuse to run code that cannot read the stored states of its computations.

    Raises:
        InvalidError: states were written by newer code, by earlier code without an ``upgrade_state`` now, with
            another codec, or with a part of another type; the error names the computation and the ways out.
        DataError: a file is missing or its bytes are wrong.
    """
    former = {new: old for old, new in evolution.renames.items()}
    for node in topology.computations.values():
        name = former.get(node.name, node.name)
        if not snapshot.files_in(name):
            continue
        stored, declared = stored_state_version(snapshot.txns, name), node.computation.state_version
        if stored > declared:
            raise InvalidError(
                "newer code has written the computation's states: run that code, or take the store back to a version "
                "before it (`millpond rewind`), or go on from such a version elsewhere (`millpond fork`)",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored < declared and type(node.computation).upgrade_state is _DEFAULT:
            raise InvalidError(
                "the computation's states are of an earlier state_version, and its code has no upgrade_state: give it "
                "one, which returns the state in its new form",
                computation=node.name,
                stored=stored,
                state_version=declared,
            )
        if stored == declared:
            _check_columns(node, snapshot, name)
    check_codecs(topology, snapshot, evolution, objects)


def state_records(topology: Topology, snapshot: Snapshot, names: frozenset[str]) -> dict[str, int]:
    """The positions that record codecs, state versions, the parts of states and the pipeline's name, except those that the table has.

    Raises:
        InvalidError: another process has renamed the pipeline meanwhile.
    """
    records = codec_records(topology, snapshot, names) | name_records(topology, snapshot)
    for name in sorted(names & topology.computations.keys()):
        version = topology.computations[name].computation.state_version
        if stored_state_version(snapshot.txns, name) != version:
            records[state_version_app_id(name, version)] = snapshot.version + 1
        columns = topology.computations[name].computation.state_columns
        if state_columns_in(snapshot.txns, name) != columns:
            records[state_columns_app_id(name, state_word(columns))] = snapshot.version + 1
    return records


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
