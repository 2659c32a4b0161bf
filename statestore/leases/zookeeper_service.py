"""The lease service of a store: an ensemble, or the store's own server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from millpond.statestore.errors import ConflictError, InvalidError, UnavailableError
from millpond.statestore.leases.ensemble import NO_ENSEMBLE, check_ensemble, recorded_ensemble
from millpond.statestore.leases.lease import Leases, unrecorded_ensemble
from millpond.statestore.leases.zookeeper_client import ZooKeeperSecurity
from millpond.statestore.leases.zookeeper_high_water import carry_over_mark
from millpond.statestore.leases.zookeeper_lease import SESSION_TIMEOUT_MS, ZooKeeperLeases
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.types import Clock, Rng

LeaseFactory: TypeAlias = Callable[[str, str], Leases]
"""Creates the leases of one writer, given the store's id and the writer's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperService:
    """A `LeaseFactory`: of the ensemble at ``hosts``, else of the store's own server.

    Attributes:
        own: the server of a store on this machine; it starts with the first leases, if there are no ``hosts``.
        resources: stops using the own server when it is closed.
    """

    hosts: str | None
    own: EmbeddedZooKeeper | None
    security: ZooKeeperSecurity
    clock: Clock
    resources: ExitStack
    session_timeout_ms: int = SESSION_TIMEOUT_MS

    @staticmethod
    def at(
        root: str,
        hosts: str | None,
        security: ZooKeeperSecurity,
        clock: Clock,
        rng: Rng,
        resources: ExitStack,
        session_timeout_ms: int = SESSION_TIMEOUT_MS,
    ) -> ZooKeeperService:
        """Return the service of the store at ``root``; `InvalidError` for an object store without ``hosts``."""
        is_local = "://" not in root
        if not (is_local or hosts):
            raise InvalidError(
                "a store in an object store is shared between machines and needs a ZooKeeper ensemble: "
                "pass zookeeper='host:port,…'",
                path=root,
            )
        own = EmbeddedZooKeeper(Path(root) / "zookeeper", clock, rng) if is_local else None
        return ZooKeeperService(
            hosts=hosts,
            own=own,
            security=security,
            clock=clock,
            resources=resources,
            session_timeout_ms=session_timeout_ms,
        )

    def __call__(self, incarnation: str, writer_id: str) -> ZooKeeperLeases:
        hosts, security, own = self.hosts, self.security, None if self.hosts else self.own
        if own is not None:
            hosts = own.start_or_join()
            self.resources.callback(own.close)
            security = own.security
        leases = ZooKeeperLeases(
            hosts or "",
            incarnation,
            writer_id,
            self.clock,
            session_timeout_ms=self.session_timeout_ms,
            security=security,
            is_own_server=own is not None,
        )
        if own is not None:
            try:
                carry_over_mark(own.damaged, incarnation, leases.high_water)
            except UnavailableError:
                leases.close()
                raise
        return leases

    def check(self, txns: Mapping[str, int]) -> None:
        """Refuse, before any server starts, another service than the one in which leases may be held."""
        recorded = recorded_ensemble(txns)
        if not self.hosts:
            check_ensemble(recorded, NO_ENSEMBLE)
        elif not recorded.id and self.own is not None and self.own.is_in_use():
            raise ConflictError(
                "cannot write to the store with an ensemble while a process uses the store's own server: stop it first",
                given=self.hosts,
            )


def connect_leases(
    factory: LeaseFactory, txns: Mapping[str, int], incarnation: str, writer_id: str
) -> Leases:
    """Create leases for a store with these transactions.

    Raises:
        InvalidError: the log names another ensemble.
        ConflictError: an ensemble was given, and a process uses the store's own server.
    """
    if isinstance(factory, ZooKeeperService):
        factory.check(txns)
    leases = factory(incarnation, writer_id)
    try:
        unrecorded_ensemble(leases, txns, 0)
    except InvalidError:
        leases.close()
        raise
    return leases
