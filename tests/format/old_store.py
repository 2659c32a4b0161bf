"""A copy of a checked-in store, which tests read, continue, and hand to other versions."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import orjson
from deltalake import DeltaTable

from millpond.statestore.store import Store
from tests.format import write
from tests.format.harbour import STORE, Customs, Harbour, Manifest, Seals, Tally, Visits

HERE: Final = Path(__file__).parent
RELEASED: Final = sorted(path.name for path in HERE.glob("v*") if path.is_dir())
CODECS: Final = {
    "visits": Visits.codec,
    "tally": Tally.codec,
    "customs": Customs.codec,
    "manifests": Manifest.codec,
    "seals": Seals.codec,
}
FOUR_DAYS_MS: Final = 4 * 24 * 3_600_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class Old:
    """A copy of an old store with its sinks, and their expected contents."""

    def __init__(self, folder: Path) -> None:
        self.contents = orjson.loads((folder / write.CONTENTS).read_bytes())
        self.harbour = Harbour(folder, self.contents["now_us"], seed="later")
        self.harbour.unpack_catalog()
        self.path = folder / STORE

    @classmethod
    def copied(cls, written: Path, folder: Path) -> Old:
        """Copy a store with its sinks, and declare that it was moved; stores before 0.2 do not record their location."""
        old = cls(shutil.copytree(written, folder))
        if old.open().lineage.location:
            own = old.harbour
            Store.open(old.path, adopt="moved", leases=own.leases, clock=own.clock, rng=own.rng).close()
        return old

    def open(self) -> Store:
        return Store.open(self.path, read_only=True, clock=self.harbour.clock)

    def states(self, version: int | None = None) -> dict[str, Any]:
        """Return the states of the computations, as in JSON."""
        with self.open() as store:
            return {name: states(store, name, version) for name in CODECS}

    def go_on(self) -> None:
        """Run the pipeline to the end of its input, with known rows and a new one."""
        with self.harbour.open() as store, self.harbour.start(store) as run:
            run.run_until_quiet()
            run.inject("arrivals", [*write.REPEATED, *write.LATER])
            run.run_until_quiet()
            self.harbour.clock.advance_ms(FOUR_DAYS_MS)
            run.finish("arrivals")
            run.run_until_quiet()

    def sinks(self) -> dict[str, Any]:
        readers = {"departures": departure, "berths": berth, "tiers": tier}
        return {
            name: sorted(map(read, rows_of(self.harbour.folder / name))) for name, read in readers.items()
        }


def states(store: Store, computation: str, version: int | None) -> dict[str, Any]:
    rows = store.rows_view(computation, version).to_arrow().to_pylist()
    return {row["key"]: plain(computation, row) for row in rows}


def plain(computation: str, row: dict[str, Any]) -> Any:
    codec = CODECS[computation]
    state = codec.decode(row["state"] if codec.is_text else row["state_bytes"])
    if computation == "manifests":
        return [[number, load.decode()] for number, load in state.items()]
    return state.hex() if computation == "seals" else state


def rows_of(table: Path) -> list[dict[str, Any]]:
    return DeltaTable(table).to_pyarrow_table().to_pylist()


def departure(row: dict[str, Any]) -> list[Any]:
    value = orjson.loads(row["value"])
    return [row["key"], micros(row["at"]), value["port"], value["ship"], value["tons"]]


def berth(row: dict[str, Any]) -> list[Any]:
    return [row["key"], micros(row["window_start"]), micros(row["window_end"]), int(row["value"])]


def tier(row: dict[str, Any]) -> list[Any]:
    value = orjson.loads(row["value"])
    return [row["key"], value["window"], value["pane"]["timing"], value["value"]]


def micros(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def flat(sinks: dict[str, Any]) -> dict[str, Any]:
    """Return rows as the readers here return them: sorted, with a departure's fields in a row."""
    departures = [[key, at, *value.values()] for key, at, value in sinks["departures"]]
    return {name: sorted(rows) for name, rows in {**sinks, "departures": departures}.items()}
