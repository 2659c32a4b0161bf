"""Incarnations of a store, by its transactions."""

from __future__ import annotations

import pytest

from millpond.executor.sinks.columns import SinkRecord
from millpond.statestore.app_ids import AppId, sink_app_id
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.history.lineage import Lineage, Origin
from millpond.statestore.log.snapshot import Snapshot
from millpond.statestore.types import Superstep


def lineage_of(*later: tuple[str, str, int], at: int = 50) -> Lineage:
    txns = {AppId.INCARNATION.of(name, origin): began for name, origin, began in later}
    txns |= {AppId.FORK.of(name, "p"): at for name, _, _ in later}
    return Lineage.of("s", txns)


def sink(**records: int) -> Snapshot:
    snapshot = Snapshot()
    snapshot.txns = {sink_app_id("s", "p", "out", name): at for name, at in records.items()}
    snapshot.txns[sink_app_id("other", "p", "out")] = 999
    return snapshot


def test_store_without_entries_is_its_first_incarnation() -> None:
    """Stores of earlier versions have no location either."""
    lineage = Lineage.of("s", {"millpond/superstep/p": 4})
    assert (lineage.current.id, lineage.current.origin, lineage.location) == ("s", Origin.CREATED, "")
    lineage.check_location("/anywhere")
    assert lineage.unrecorded_location("/a b") == {AppId.LOCATION.of("/a b"): 0}
    assert lineage.unrecorded_location("memory://1") == {}


def test_current_location_is_the_last_one_seen() -> None:
    lineage = Lineage.of("s", {AppId.LOCATION.of("/a/ü"): 9, AppId.LOCATION.of("/b"): 5})
    lineage.check_location("/a/ü")
    with pytest.raises(InvalidError, match=r"location has changed.*path=`/b` was=`/a/ü`"):
        lineage.check_location("/b")


@pytest.mark.parametrize(
    ("later", "records", "delivered"),
    [
        ((), {}, 0),
        ((), {"s": 50}, 50),
        ((("r", "restored", 9),), {"s": 49}, 49),
        ((("r", "restored", 9),), {"s": 50, "r": 53}, 53),
        ((("c", "copy", 9),), {"c": 51}, 51),
        ((("c", "copy", 9), ("r", "restored", 12)), {"c": 50}, 50),
    ],
)
def test_sink_fits_continued_incarnations(
    later: tuple[tuple[str, str, int], ...], records: dict[str, int], delivered: int
) -> None:
    """The sink must not be ahead of the point from which the store continued."""
    record = SinkRecord(lineage_of(*later), "p", "out", Superstep(60))
    record.check_on_opening(sink(**records))
    assert record.delivered(sink(**records).txns) == delivered


@pytest.mark.parametrize(
    ("later", "records", "error"),
    [
        ((), {"s": 61}, DataError),
        ((), {"c": 1}, InvalidError),
        ((("r", "restored", 9),), {"s": 51}, DataError),
        ((("r", "restored", 9),), {"s": 50, "r": 61}, DataError),
        ((("c", "copy", 9),), {"s": 1}, InvalidError),
        ((("c", "copy", 9), ("r", "restored", 12)), {"s": 1, "c": 50}, InvalidError),
        ((("c", "copy", 9), ("r", "restored", 12)), {"c": 51}, DataError),
    ],
)
def test_sink_ahead_or_of_another_copy_refuses_store(
    later: tuple[tuple[str, str, int], ...], records: dict[str, int], error: type[Exception]
) -> None:
    record = SinkRecord(lineage_of(*later), "p", "out", Superstep(60))
    with pytest.raises(error):
        record.check_on_opening(sink(**records))
