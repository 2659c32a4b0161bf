"""Plans a rewind: the whole store goes back to one of its versions, in one fenced commit.

It is what a repair does, with a version that a person has chosen: rows, timers, ids, productions and input positions go
back together; fences and supersteps rise; older versions, those that are undone too, stay readable as long as the
retention or a savepoint keeps them. So a rewind can itself be rewound.
"""

from __future__ import annotations

from millpond.executor.replay.repair_plan import RepairPlan
from millpond.statestore.app_ids import supersteps_of
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.history.replayed_log import TableState, read_histories, replay_log
from millpond.statestore.log.high_water import Mark
from millpond.statestore.log.log import Log
from millpond.statestore.types import Objects, Superstep, TableVersion


def plan_rewind(objects: Objects, version: TableVersion, mark: Mark | None) -> RepairPlan:
    """Plan to take a sound store back to a version.

    Args:
        objects: the table's root.
        version: the version whose rows and positions the store is to have.
        mark: the high-water mark; ``None`` if it is not known.

    Raises:
        InvalidError: there is no such version.
        DataError: the log is damaged, or does not reach back that far.
        UnavailableError: the store is unavailable.
    """
    log = Log(objects)
    latest = log.latest_version()
    histories = read_histories(log, mark)
    # What lands meanwhile is seen by the one and not by the other, and then the commit finds its version taken.
    if (
        not histories
        or latest is None
        or histories[0].newest < latest
        or (mark is not None and mark.version > latest)
    ):
        raise DataError("the log is damaged: repair the store first (`millpond repair`)", store=objects.url)
    history = histories[0]
    if not 0 <= version <= history.newest:
        raise InvalidError(
            "there is no such table version (see `millpond history`)", version=version, newest=history.newest
        )
    replayed = replay_log(log, version)
    return RepairPlan(
        newest=history.newest,
        state=TableState(version=version, live=dict(replayed.adds), txns=dict(replayed.snapshot.txns)),
        history=history,
        healed={},
        restored=(),
        lost=(),
        set_aside=(),
        txns=dict(history.state.txns),
        is_readable=True,
        kind="rewind",
        source_offsets=dict(replayed.snapshot.source_offsets),
        watermarks=dict(replayed.snapshot.watermarks),
    )


def sinks_of_rewind(plan: RepairPlan) -> dict[str, Superstep]:
    """By pipeline: the superstep to which a sink's table goes back with a store.

    It is the one before the version's last, whose productions are undelivered there, and which is delivered again under
    another number; also where no superstep is undone.
    """
    if not plan.is_rollback:
        return {}
    then = supersteps_of(plan.state.txns)
    return {pipeline: Superstep(max(then.get(pipeline, 0) - 1, 0)) for pipeline in supersteps_of(plan.txns)}
