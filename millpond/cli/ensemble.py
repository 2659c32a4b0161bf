"""``millpond ensemble``: which ZooKeeper ensemble serves a store, and moving it to another."""

from __future__ import annotations

from contextlib import ExitStack, closing

from millpond.cli.terminal.cli_help import Example, command
from millpond.cli.terminal.opening import StoreAt, read_options, store_argument, zookeeper_options
from millpond.cli.terminal.options import flag, json_option, option
from millpond.cli.terminal.output import result_as_json, say
from millpond.statestore.errors import InvalidError
from millpond.statestore.history.lineage import ROWS_FOLDER, Lineage, move_to_ensemble, place_of
from millpond.statestore.leases.ensemble import NO_ENSEMBLE, Ensemble, recorded_ensemble
from millpond.statestore.leases.zookeeper_client import security_of
from millpond.statestore.leases.zookeeper_service import ZooKeeperService, connect_leases
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.log.table import check_format, store_id_of
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.system import SystemClock, SystemRng

_OWN = "own"


@command(
    "millpond ensemble pond",
    "millpond ensemble pond --move-to own",
    Example("millpond ensemble pond --move-to zk4:2181,zk5:2181,zk6:2181", not_run="an ensemble"),
    Example("millpond ensemble pond --move-to zk4:2181 --lost", not_run="an ensemble"),
)
@store_argument
@option(
    "--move-to=HOSTS", "The ensemble that serves the store from now on, or `own` for the store's own server."
)
@flag("--lost", "The ensemble that served the store is gone for good: do not ask it whether a pipeline runs.")
@zookeeper_options
@json_option("One JSON object: the ensemble's id and hosts, empty for the store's own server.")
def ensemble(store: StoreAt, move_to: str | None, *, lost: bool, as_json: bool) -> None:
    """Show which ZooKeeper ensemble serves STORE, or move STORE to another.

    The store's log names the ensemble from its first take-over on, and every command that writes is refused with
    another ensemble or none. A changed list of hosts of the same ensemble needs no move.

    With --move-to, stop the pipelines of the store before: the command asks the present ensemble whether one runs.
    Its hosts are in the log; give --zookeeper if they have changed. --zookeeper-security is for both ensembles.
    """
    with result_as_json(as_json) as result:
        root = place_of(store.path)
        log = Log(open_objects(root, read_options(store.storage_options), folder=ROWS_FOLDER))
        snapshot = load(log)
        check_format(snapshot)
        serves = recorded_ensemble(snapshot.txns)
        if move_to is not None:
            serves = _move(log, snapshot, root, store, None if move_to == _OWN else move_to, is_lost=lost)
        elif lost:
            raise InvalidError("--lost is about a move: give --move-to")
        result |= {"store": store.path, "id": serves.id, "hosts": serves.hosts}
        say(
            f"served by ensemble {serves.hosts} (id {serves.id})" if serves.id else "served by its own server"
        )


def _move(
    log: Log, snapshot: Snapshot, root: str, store: StoreAt, hosts: str | None, *, is_lost: bool
) -> Ensemble:
    clock, rng, recorded = SystemClock(), SystemRng(), recorded_ensemble(snapshot.txns)
    incarnation = Lineage.of(store_id_of(snapshot), snapshot.txns).current.id
    with ExitStack() as resources:

        def service(at: str | None) -> ZooKeeperService:
            security = security_of(at, store.zookeeper_security if at else None)
            return ZooKeeperService.at(root, at, security, clock, rng, resources)

        present, target = None, service(hosts)
        if recorded.id and not is_lost:
            asked = service(store.zookeeper or recorded.hosts)
            present = resources.enter_context(
                closing(connect_leases(asked, snapshot.txns, incarnation, rng.token()))
            )
        elif not recorded.id:
            # Nothing of the own server moves, so it only must not be in use.
            target.check(snapshot.txns)
        to = NO_ENSEMBLE
        if hosts is not None:
            with closing(target(incarnation, rng.token())) as leases:
                to = leases.ensemble
        if to != recorded:
            move_to_ensemble(log, present, to, clock, rng)
        return to
