"""A sink's record of a store in the sink's table: the last superstep of each incarnation, as transactions.

A superstep's number identifies what was delivered only within one incarnation of a store. So the record
has the incarnation in its name, and a sink refuses a store that the record does not fit: a store that was
restored from an older copy, if the table has other versions of its supersteps; and a copy that writes into
the table of its original, or the other way round.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from millpond.statestore.app_ids import SINK_PREFIX, app_id_parts, sink_app_id
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.identity.lineage import Lineage
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Superstep

_LOG: Final = logging.getLogger("millpond")


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """The record of one sink of one pipeline of one store.

    Args:
        lineage: the store's lineage.
        pipeline: the pipeline's name.
        name: the sink's name.
        reached: the store's last superstep when the sink is opened; ``None`` if unknown.
    """

    lineage: Lineage
    pipeline: str
    name: str
    reached: Superstep | None = None

    @staticmethod
    def of_store(store_id: str, pipeline: str, name: str) -> SinkRecord:
        """The record of a store that is known only by its id."""
        return SinkRecord(Lineage.of(store_id, {}), pipeline, name)

    @property
    def app_id(self) -> str:
        """The transaction that this incarnation's deliveries advance."""
        return sink_app_id(self.lineage.store_id, self.pipeline, self.name, self.lineage.current.id)

    def delivered(self, txns: Mapping[str, int]) -> Superstep:
        """This store's last superstep in the table; 0 before the first."""
        return Superstep(max((superstep for _, superstep in self.records(txns)), default=0))

    def records(self, txns: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """The last superstep of each incarnation of the store that has written to the table."""
        return ((incarnation, txns[app_id]) for app_id, incarnation in self.app_ids(txns))

    def limits(self, txns: Mapping[str, int], reached: Superstep) -> dict[str, int]:
        """The highest superstep of each transaction that fits a store whose incarnation is at ``reached``.

        Transactions of other copies of the store are left out.
        """
        limits = {}
        for app_id, incarnation in self.app_ids(txns):
            if not self.lineage.is_of_another_copy(incarnation):
                left = self.lineage.left_at(incarnation, self.pipeline)
                limits[app_id] = int(reached) if left is None else left
        return limits

    def app_ids(self, txns: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """The transactions of this sink, each with the incarnation that moves it."""
        first = sink_app_id(self.lineage.store_id, self.pipeline, self.name)
        for app_id in txns:
            if app_id == first or app_id.startswith(f"{first}/"):
                yield app_id, unquote(app_id.removeprefix(first).removeprefix("/")) or self.lineage.store_id

    def check(self, snapshot: Snapshot) -> None:
        """Refuse a table whose record does not fit the store.

        Raises:
            InvalidError: the original of this copy, or another copy of this store, writes into the table.
            DataError: the table is ahead of where an earlier incarnation was left.
        """
        for incarnation, superstep in self.records(snapshot.txns):
            if self.lineage.is_of_another_copy(incarnation):
                raise InvalidError(
                    "another copy of this store writes into the sink's table: give this one a sink of its own",
                    sink=self.name,
                    table=(snapshot.metadata.name if snapshot.metadata else None) or self.name,
                    incarnation=self.lineage.current.id,
                    other=incarnation,
                )
            left = self.lineage.left_at(incarnation, self.pipeline)
            if left is not None:
                refuse_sink_ahead(self.name, superstep, left)

    def check_on_opening(self, snapshot: Snapshot, path: str = "") -> None:
        """Refuse a table whose record does not fit the store as it is now; warn of one that another store writes to.

        Args:
            snapshot: the table.
            path: where it lies, for the warning.

        Raises:
            InvalidError: another copy of this store writes into the table.
            DataError: the table is ahead of the store.
        """
        self.check(snapshot)
        self._warn_of_others(snapshot, path)
        if self.reached is not None:
            refuse_sink_ahead(self.name, self.delivered(snapshot.txns), self.reached)

    def _warn_of_others(self, snapshot: Snapshot, path: str) -> None:
        """Warn of a table that has rows of another store: one that is no longer there, whose rows come a second time."""
        writers = (
            app_id_parts(name, SINK_PREFIX)[0] for name in snapshot.txns if name.startswith(SINK_PREFIX)
        )
        others = sorted(set(writers) - {self.lineage.store_id})
        if others and not self.delivered(snapshot.txns):
            _LOG.warning(
                "the sink's table has rows of another store, and this one adds its own: if that store is gone, they are "
                "there twice in the end; give the sink another path, or remove the table: sink=`%s` path=`%s` stores=`%s`",
                self.name,
                path,
                others,
            )


def refuse_sink_ahead(sink: str, delivered: int, reached: int) -> None:
    """Refuse a sink that is ahead of the store.

    Raises:
        DataError: the sink has a later superstep.
    """
    if delivered > reached:
        raise DataError(
            "the sink is ahead of the store, which was restored from an older copy: what it would deliver "
            "again may differ from what the sink has. Put the newer store back; or continue with this one and "
            "write to a new sink, or take the sink back (`millpond adopt STORE --as restored --take-back SINK`)",
            sink=sink,
            delivered=delivered,
            store=reached,
        )
