"""What it costs to give records in the order of time.

A stream of N records over K keys, ten a second, goes through a computation that sets a timer at each record, on the
local runner in memory, in pieces. Each figure is the processor time of a fresh process's run in microseconds a record:
as the records come; sorted, where they come in order; sorted, where they come out of order by up to so many seconds,
so that the watermark is as far behind and those behind it wait in their rows; and sorted where nothing is known of the
watermark before the commit, so that each record waits for the next superstep.

    python -m benchmarks.time_sorted --json build/bench/time_sorted.json
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result

_TENTH_US: Final = 100_000
_HOUR_US: Final = 3_600_000_000

FORMS: Final[Mapping[str, tuple[bool, float, bool]]] = {
    "as they come": (False, 0, True),
    "sorted, in order": (True, 0, True),
    "sorted, 10 s out of order": (True, 10, True),
    "sorted, 100 s out of order": (True, 100, True),
    "sorted, all wait for the commit": (True, 0, False),
}
"""Whether it is sorted, the disorder in seconds, and whether the watermark is foreseen."""


class Last(mp.Computation):
    """Keeps the last record's time, and waits an hour."""

    def process_record(self, context: mp.Context, record: mp.Record) -> None:
        """Move the timer on."""
        context.state.set(record.at)
        context.set_timer(record.at + _HOUR_US)

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        """Count the silence."""


def run_once(form: str, records: int, keys: int, pieces: int) -> dict[str, Any]:
    """Run a form, and return its processor time in microseconds a record, and how many records waited."""
    is_sorted, disorder_s, is_foreseen = FORMS[form]
    random = np.random.default_rng(1)
    at = np.arange(records, dtype=np.int64) * _TENTH_US
    arrival = np.argsort(at + random.integers(0, int(disorder_s * 1_000_000) + 1, records), kind="stable")
    of_key = random.integers(0, keys, records)
    rows = pa.table({"key": pa.array([f"key-{key}" for key in of_key.tolist()]), "at": at}).take(arrival)
    policy: mp.types.WatermarkPolicy = mp.BoundedDisorder(f"{disorder_s}s")
    pipeline = mp.Pipeline("sorted")
    stream = pipeline.inject(
        "s", key="key", at="at", watermark=policy if is_foreseen else mp.ManualWatermark()
    )
    stream.apply(Last(), name="last", time_sorted=is_sorted)
    size = -(-records // pieces)
    with mp.Store.in_memory() as store:
        runner = mp.LocalRunner(store, progress=False, upkeep=None)
        with runner.start(pipeline, stepping=True) as run:
            before = resource.getrusage(resource.RUSAGE_SELF)
            for start in range(0, records, size):
                run.inject("s", rows.slice(start, size))
                if not is_foreseen:
                    run.step()
                    run.advance_watermark("s", int(at[min(start + size, records) - 1]) + 1)
                run.run_until_quiet()
            after = resource.getrusage(resource.RUSAGE_SELF)
            counts = run.summary().totals.by_computation.get("last", {})
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "form": form,
        "records": records,
        "keys": keys,
        "pieces": pieces,
        "waited": counts.get("waited", 0),
        "cpu_us_per_record": round(cpu_s * 1_000_000 / records, 2),
    }


def measure(records: int, keys: int, pieces: int, rounds: int) -> list[dict[str, Any]]:
    """Measure each form in a separate process, in turns; the figure is the minimum of some rounds."""
    best: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for form in FORMS:
            figure = _in_a_process(form, records, keys, pieces)
            known = best.setdefault(form, figure)
            best[form] = min(known, figure, key=lambda one: float(one["cpu_us_per_record"]))
    return list(best.values())


def _in_a_process(form: str, records: int, keys: int, pieces: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        # The first run pays for imports.
        pool.submit(run_once, form, 100, keys, 2).result()
        return pool.submit(run_once, form, records, keys, pieces).result()


@click.command(help=__doc__)
@click.option("--records", default=200_000, show_default=True)
@click.option("--keys", default=100, show_default=True)
@click.option("--pieces", default=20, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
def main(records: int, keys: int, pieces: int, rounds: int, path: Path | None) -> None:
    """Measure, and tell."""
    tell_result({"figures": measure(records, keys, pieces, rounds)}, path)


if __name__ == "__main__":
    main()
