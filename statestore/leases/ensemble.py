"""The ZooKeeper ensemble that serves a store, as the store's log names it.

Leases keep two writers apart only if both ask the same service. So the log names a store's ensemble from the first
take-over on, by an id that lies in the ensemble: it survives a changed list of hosts, which errors show. The log of a
store with its own server names none.

An entry is the position ``millpond/ensemble/<id>/<hosts>``. The newest counts, and one with an empty id names none.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millpond.statestore.app_ids import AppId
from millpond.statestore.errors import InvalidError

_LOG: Final = logging.getLogger("millpond")
HOSTS_VARIABLE: Final = "MILLPOND_ZOOKEEPER"
_USERS: Final = re.compile(r"[^,@]*@")


@dataclass(frozen=True, slots=True)
class Ensemble:
    """An ensemble's random id, and the ``host:port,…`` under which it was reached last."""

    id: str
    hosts: str

    def has_hosts_of(self, other: Ensemble) -> bool:
        return sorted(self.hosts.split(",")) == sorted(other.hosts.split(","))


NO_ENSEMBLE: Final = Ensemble("", "")


def hosts_in_environment() -> str | None:
    return os.environ.get(HOSTS_VARIABLE) or None


def recorded_ensemble(txns: Mapping[str, int]) -> Ensemble:
    """Return the ensemble that the log names, or `NO_ENSEMBLE`."""
    entries = {app_id: at for app_id, at in txns.items() if app_id.startswith(AppId.ENSEMBLE)}
    newest = max(entries, key=entries.__getitem__, default=None)
    return NO_ENSEMBLE if newest is None else Ensemble(*AppId.ENSEMBLE.parts(newest))


def ensemble_entry(ensemble: Ensemble, version: int) -> dict[str, int]:
    """Return the position that names an ensemble from a table version on; hosts are kept without users."""
    return {AppId.ENSEMBLE.of(ensemble.id, _USERS.sub("", ensemble.hosts)): version}


def missing_entry(txns: Mapping[str, int], ensemble: Ensemble, version: int) -> dict[str, int]:
    """Return the position that names a writer's ensemble, unless the log does already.

    Raises:
        InvalidError: the log names another one, in which leases may be held.
    """
    recorded = recorded_ensemble(txns)
    check_ensemble(recorded, ensemble)
    return {} if not ensemble.id or recorded == ensemble else ensemble_entry(ensemble, version)


def check_ensemble(recorded: Ensemble, given: Ensemble) -> None:
    """Raise `InvalidError` if the log names another ensemble than the writer's."""
    if not recorded.id or recorded.id == given.id:
        return
    if given.id and recorded.has_hosts_of(given):
        # An ensemble that has lost its data has lost its id and all leases with it.
        _LOG.warning(
            "the ensemble has another identity than before: its data was lost, or other servers have these hosts "
            "hosts=`%s`",
            given.hosts,
        )
        return
    way_out = f"pass zookeeper='{recorded.hosts}', or move the store with `millpond ensemble`"
    if not given.id:
        raise InvalidError(
            f"cannot write to the store without the ensemble that serves it: {way_out}", serves=recorded.hosts
        )
    raise InvalidError(
        f"cannot write to the store with another ensemble than the one that serves it: {way_out}",
        given=given.hosts,
        serves=recorded.hosts,
    )
