"""Writes the store that `tests/format/test_format.py` reads indefinitely: ``python -m tests.format.write``.

Run it once for each release, and check in its output: ``v0.1`` and so on, a store and its sinks, and their
contents as plain JSON. The contents are written here manually, not read from the store. An existing folder
is never overwritten.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
import orjson

from millpond.executor.local.run import LocalRun
from millpond.executor.maintenance.offline_gc import collect_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.gc.compaction import CompactionPolicy
from tests.format.harbour import START_US, Harbour, minute

CONTENTS: Final = "contents.json"
"""Name of the file that says what is in a store."""

_HERE: Final = Path(__file__).parent
_COMPACTING: Final = UpkeepPolicy(
    compaction=CompactionPolicy(fan_in=2), collect_every=1_000, background=False
)
_COLLECTING: Final = UpkeepPolicy(retention="1h", collect_every=1)
_STEP_MS: Final = 60_000
_PAUSE_MS: Final = 2 * 3_600_000


def _row(name: str, at: int, tons: int, number: int, ship: str | None, *, cleared: bool = False) -> Any:
    return {"id": name, "ship": ship, "at": minute(at), "tons": tons, "number": number, "cleared": cleared}


_CONSUMERS: Final = ("visits", "manifests", "seals", "customs", "berths", "tiers")
_EMILE: Final = "émile ⚓"
_EARLY: Final = (
    [_row("a1", 0, 5, 1, "ada"), _row("b1", 1, 7, 2, "bob")],
    [_row("a2", 2, 3, 3, "ada"), _row("e1", 3, 11, 4, _EMILE)],
    # A duplicate, a row without a key, and a load that one computation refuses.
    [_row("a1", 0, 5, 1, "ada"), _row("b2", 4, 2, 5, "bob")],
    [_row("x1", 5, 1, 0, None), _row("b3", 5, -1, 6, "bob")],
    [_row("e2", 6, 1, 7, _EMILE)],
)
_THEN: Final = [_row("a3", 13, 4, 8, "ada"), _row("b4", 15, 6, 9, "bob", cleared=True)]
_LATE: Final = [_row("e3", 4, 100, 10, _EMILE)]

REPEATED: Final = [_row("a1", 0, 5, 1, "ada"), _row("e2", 6, 1, 7, _EMILE)]
"""Rows that the store has consumed, for those who go on with it."""

LATER: Final = [_row("a4", 30, 9, 11, "ada")]
"""A row that it has not."""


def write(folder: Path) -> None:
    """Write a store, its sinks, and what must be in them.

    Args:
        folder: where; it is made.
    """
    harbour = Harbour(folder)
    with harbour.open() as store, harbour.start(store, _COMPACTING) as run:
        for rows in _EARLY:
            _handle(harbour, run, rows)
        run.advance_watermark("arrivals", minute(10), percentile=50)
        run.run_until_quiet()
    harbour.clock.advance_ms(_PAUSE_MS)
    with harbour.open() as store:
        collect_offline(store, harbour.clock, harbour.rng, _COLLECTING)
    with harbour.open() as store, harbour.start(store) as run:
        run.advance_watermark("arrivals", minute(12))
        run.run_until_quiet()
        older = int(store.snapshot().version)
        _handle(harbour, run, _THEN)
        run.advance_watermark("arrivals", minute(20), percentile=50)
        _handle(harbour, run, _LATE)
        # Leave productions undelivered: sinks have them, but the other computation gets them in another run.
        run.advance_watermark("arrivals", minute(14))
        run.step()
        newest = int(store.snapshot().version)
    harbour.pack_catalog()
    document = {
        **contents(),
        "older_version": older,
        "newest_version": newest,
        "now_us": harbour.clock.now_us(),
    }
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    (folder / CONTENTS).write_bytes(orjson.dumps(document, option=option))


def _handle(harbour: Harbour, run: LocalRun, rows: list[Any]) -> None:
    run.inject("arrivals", rows)
    run.run_until_quiet()
    harbour.clock.advance_ms(_STEP_MS)


def contents() -> dict[str, Any]:
    """Return the expected contents, derived from the pipeline's meaning alone.

    Bytes are hexadecimal, times microseconds.
    """
    return {
        "older": {
            "visits": _visits(ada=(2, 8, 1, 0), bob=(2, 9, 0, 0), emile=(2, 12, 0, 0)),
            "tally": {"north": 1},
        },
        "newest": {
            "visits": _visits(ada=(3, 12, 1, 0), bob=(3, 15, 0, 0), emile=(3, 112, 1, 0)),
            "tally": {"north": 1},
            "customs": {"ada": "waits", _EMILE: "waits"},
            "manifests": _manifests({1: 5, 3: 3, 8: 4}, {2: 7, 5: 2, 6: -1, 9: 6}, {4: 11, 7: 1, 10: 100}),
            "seals": {"ada": "010308", "bob": "02050609", _EMILE: "04070a"},
        },
        "timers": {
            "visits": {
                "ada": [
                    ["inspect", "wall", _inspected(5), minute(13)],
                    ["leave", "event", minute(23), minute(23)],
                ],
                "bob": [
                    ["inspect", "wall", _inspected(5), minute(15)],
                    ["leave", "event", minute(25), minute(25)],
                ],
                _EMILE: [["inspect", "wall", _inspected(6), minute(4)]],
            },
            "customs": {
                "ada": [["", "hold", minute(0), minute(0)]],
                _EMILE: [["", "hold", minute(3), minute(3)]],
            },
        },
        "positions": {
            "millpond/superstep/harbour": 11,
            "millpond/watermark/harbour/injector/arrivals": minute(14),
            "millpond/watermark/harbour/computation/visits": minute(14),
            "millpond/watermark/harbour/computation/tiers@50.0": minute(20),
        },
        "dead_letters": [
            ["visits", "bob", "b3", "ValueError: a ship cannot bring less than nothing"],
            *[[name, None, "x1", "the key is null"] for name in sorted(_CONSUMERS)],
        ],
        "undelivered": [["departures", _EMILE, _departure(_EMILE, 112), minute(14)]],
        "sinks": {
            "departures": [
                ["ada", minute(12), _departure("ada", 8)],
                [_EMILE, minute(14), _departure(_EMILE, 112)],
            ],
            "berths": _berths((0, "ada", 8), (0, "bob", 8), (0, _EMILE, 12)),
            "tiers": _tiers("early", (0, "ada", 2), (0, "bob", 3), (0, _EMILE, 2))
            + _tiers("on_time", (0, "ada", 2), (0, "bob", 3), (0, _EMILE, 2))
            + _tiers("early", (10, "ada", 1), (10, "bob", 1)),
        },
        "continued": _continued(),
    }


def _continued() -> dict[str, Any]:
    """Return the contents after `REPEATED`, `LATER`, three days and the end of the input."""
    return {
        "newest": {
            "visits": _visits(ada=(4, 21, 1, 1), bob=(3, 15, 1, 1), emile=(3, 112, 1, 1)),
            "tally": {"north": 4},
            "customs": {"ada": "waits", _EMILE: "waits"},
            "manifests": _manifests(
                {1: 5, 3: 3, 8: 4, 11: 9}, {2: 7, 5: 2, 6: -1, 9: 6}, {4: 11, 7: 1, 10: 100}
            ),
            "seals": {"ada": "0103080b", "bob": "02050609", _EMILE: "04070a"},
        },
        "sinks": {
            "departures": [
                ["ada", minute(12), _departure("ada", 8)],
                [_EMILE, minute(14), _departure(_EMILE, 112)],
                ["bob", minute(25), _departure("bob", 15)],
                ["ada", minute(40), _departure("ada", 21)],
            ],
            "berths": _berths(
                (0, "ada", 8), (0, "bob", 8), (0, _EMILE, 12), (10, "ada", 4), (10, "bob", 6), (30, "ada", 9)
            ),
        },
    }


def _visits(**ships: tuple[int, int, int, int]) -> dict[str, Any]:
    names = ("visits", "tons", "left", "inspected")
    return {_name(ship): dict(zip(names, numbers, strict=True)) for ship, numbers in ships.items()}


def _manifests(ada: dict[int, int], bob: dict[int, int], emile: dict[int, int]) -> dict[str, Any]:
    ships = {"ada": ada, "bob": bob, _EMILE: emile}
    return {ship: [[number, f"{tons} t"] for number, tons in loads.items()] for ship, loads in ships.items()}


def _name(ship: str) -> str:
    return _EMILE if ship == "emile" else ship


def _inspected(step: int) -> int:
    # The ship's last record came three days earlier, after the collection.
    return START_US + 1_000 * (step * _STEP_MS + _PAUSE_MS + 72 * 3_600_000)


def _departure(ship: str, tons: int) -> dict[str, Any]:
    return {"port": "north", "ship": ship, "tons": tons}


def _berths(*sums: tuple[int, str, int]) -> list[Any]:
    return [[ship, minute(start), minute(start + 10), tons] for start, ship, tons in sums]


def _tiers(timing: str, *counts: tuple[int, str, int]) -> list[Any]:
    return [[ship, [minute(start), minute(start + 10)], timing, count] for start, ship, count in counts]


@click.command()
def main() -> None:
    release = ".".join(version("millpond").split(".")[:2])
    folder = _HERE / f"v{release}"
    if folder.exists():
        raise click.ClickException(f"{folder} is there: what was released is never written again")
    write(folder)
    click.echo(f"wrote {folder}")


if __name__ == "__main__":
    main()
