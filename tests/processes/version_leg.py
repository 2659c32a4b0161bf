"""One leg of a store's way through versions of Millpond: a program for today's version and former ones.

It uses only names that all of these versions have, and each version's own `tests.format`. Commands:

- ``harbour FOLDER NOW_US STEP`` continues a checked-in store: known rows, a new row, or the end of the input;
- ``shop FOLDER HOSTS FIRST LAST END`` runs batches of a pipeline of its own, with an ensemble or, without hosts,
  the store's server. It makes a savepoint before the last batch,
  and with the end ``kill`` dies in the middle of it; with ``fenced`` it goes on once a line of input comes, and
  expects to be refused;
- ``read FOLDER`` prints every row, savepoint versions included, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Final

import millpond as mp
from tests.format import write
from tests.format.harbour import Harbour

_FOUR_DAYS_MS: Final = 4 * 24 * 3_600_000
_BATCH: Final = 10
_BEGIN_US: Final = 1_767_225_600_000_000
_LETTER: Final = ("computation", "stream", "key", "value", "at", "error")
_SHOWN: Final = ("key", "state", "state_bytes", "timers", "hold")


class Basket(mp.Computation):
    """Counts; a timer adds a thousand once a key is quiet; some records become dead letters."""

    def process_record(self, context: Any, record: Any) -> None:
        if record.value["n"] % 25 == 7:
            raise ValueError("spoilt")
        count = context.state.get(0) + 1
        context.state.set(count)
        context.set_timer(record.at + 5_000_000, "quiet")
        context.produce("counts", {"count": count})

    def process_timer(self, context: Any, timer: Any) -> None:
        del timer
        context.state.set(context.state.get(0) + 1_000)


def harbour(folder: str, now_us: str, step: str) -> None:
    port = Harbour(Path(folder), int(now_us), seed=f"{step} {mp.__file__}")
    with port.open() as store, port.start(store) as run:
        run.run_until_quiet()
        if step == "end":
            port.clock.advance_ms(_FOUR_DAYS_MS)
            run.finish("arrivals")
        else:
            run.inject("arrivals", write.REPEATED if step == "known" else write.LATER)
        run.run_until_quiet()


def shop(folder: str, hosts: str, first: str, last: str, end: str) -> None:
    pipeline = mp.Pipeline("shop")
    orders = pipeline.inject("orders", key="k", at="t", id="id", watermark=mp.BoundedDisorder("2s"))
    baskets = orders.apply(Basket(), name="baskets", produces="counts", retries=0)
    baskets.sink("counts", mp.DeltaSink(f"{folder}/counts"))
    windows = orders.window(mp.FixedWindows("10s")).combine(mp.Count(), name="by_time")
    windows.sink("windows", mp.DeltaSink(f"{folder}/windows", mode="upsert"))
    upkeep = mp.UpkeepPolicy(
        compaction=mp.CompactionPolicy(fan_in=2), collect_every=16, retention=0, background=False
    )
    with mp.Store.open(f"{folder}/pond", zookeeper=hosts or None, session_timeout_ms=4_000) as store:
        runner = mp.LocalRunner(store, progress=False, upkeep=upkeep, dead_letter_limit=None)
        run = runner.start(pipeline, stepping=True)
        run.run_until_quiet()
        for batch in range(int(first), int(last)):
            if batch == int(last) - 1:
                store.savepoint(f"before batch {batch}")
            run.inject("orders", _orders(batch))
            if batch == int(last) - 1 and end == "kill":
                run.step()
                os.kill(os.getpid(), signal.SIGKILL)
            run.run_until_quiet()
        if end == "fenced":
            print("ready", flush=True)
            sys.stdin.readline()
            try:
                run.inject("orders", _orders(int(last)))
                run.run_until_quiet()
            except mp.FencedError:
                print("fenced")
                return
        run.stop()


def _orders(batch: int) -> list[dict[str, Any]]:
    # A pause after each batch of five lets timers fire and windows close.
    begin = _BEGIN_US + batch // 5 * 20_000_000
    numbers = range(batch * _BATCH, (batch + 1) * _BATCH)
    return [{"id": str(n), "k": f"k{n % 7}", "t": begin + n * 250_000, "n": n} for n in numbers]


def read(folder: str) -> None:
    """Print what a store holds at its newest version and at its savepoints, except times and names of the run."""
    with mp.Store.open(Path(folder), read_only=True) as store:
        # The first version had no savepoints in its log.
        points = getattr(store, "savepoints", tuple)()
        versions = {point.name: point.version for point in points} | {"": store.snapshot().version}
        found = {name: _contents(store, version) for name, version in versions.items()}
    answer = {"from": str(Path(mp.__file__).resolve().parent), "found": found}
    print(json.dumps(answer, sort_keys=True, default=str))


def _contents(store: Any, version: int) -> dict[str, Any]:
    names = {file.computation for file in store.snapshot(version).files}
    return {
        name: sorted(_text(name, row) for row in store.rows_view(name, version).to_arrow().to_pylist())
        for name in names
    }


def _text(computation: str, row: dict[str, Any]) -> str:
    # A dead letter's key and time differ from run to run.
    shown, names = (json.loads(row["state"]), _LETTER) if computation == "dead_letters" else (row, _SHOWN)
    return json.dumps({name: shown.get(name) for name in names}, sort_keys=True, default=str)


COMMANDS: Final = {"harbour": harbour, "shop": shop, "read": read}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](*sys.argv[2:])
