"""The cost of exact sums: `Sum` next to a combiner that rounds at each addition.

First the combiner alone, in nanoseconds of processor time per number: floats, whole numbers and both, added one
by one, as for triggers that look after each element, and a hundred at a time. Then whole runs of
`LocalRunner` over many keys, with rows as dicts and as an Arrow table, and with a trigger that waits for the
window's end and one that shows each element. Both sums run in turns in one process, so that other load
affects both; ``ratio`` is the median of exact to rounding.

    python -m benchmarks.exact_sums --json build/bench/exact_sums.json
"""

from __future__ import annotations

import gc
import resource
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pyarrow as pa

import millpond as mp
from benchmarks.json_result import tell_result

_AT_A_TIME: Final = 100
_KEYS: Final = 1_000
_SECOND_US: Final = 1_000_000


class RoundingSum(mp.CombineFn):
    """The sum as plain Python adds: rounded at each addition.

    Args:
        of: the field that is summed; ``None``: the value itself.
    """

    def __init__(self, of: str | None = None) -> None:
        self.of = of

    def create(self) -> int | float:
        """Zero."""
        return 0

    def add(self, accumulator: Any, value: Any) -> Any:
        """Add, and round."""
        return accumulator + (value if self.of is None else value[self.of])

    def merge(self, accumulators: Sequence[Any]) -> Any:
        """Add, and round."""
        return sum(accumulators)


def _numbers(count: int) -> Mapping[str, list[Any]]:
    floats = np.random.default_rng(1).uniform(0, 1_000, count).round(2).tolist()
    whole = [int(number) for number in floats]
    mixed = [pair[index % 2] for index, pair in enumerate(zip(floats, whole, strict=True))]
    return {"floats": floats, "whole numbers": whole, "both": mixed}


def of_the_combiner(count: int = 20_000, rounds: int = 7) -> list[dict[str, Any]]:
    """The cost of a number in each way of adding it.

    Returns:
        By kind of numbers and number of them at a time, nanoseconds of processor time for each.
    """
    figures = []
    for kind, numbers in _numbers(count).items():
        for at_a_time in (1, _AT_A_TIME):
            pieces = [numbers[start : start + at_a_time] for start in range(0, count, at_a_time)]
            took = _in_turns(
                [partial(_added, combine, pieces) for combine in (RoundingSum(), mp.Sum())], rounds
            )
            rounding, exact = (statistics.median(times) / count * 1e9 for times in took)
            figure = {"numbers": kind, "at_a_time": at_a_time}
            figures.append({**figure, "rounding_ns": round(rounding), "exact_ns": round(exact)})
    return figures


def _added(combine: mp.CombineFn, pieces: Iterable[Sequence[Any]]) -> None:
    accumulator = combine.create()
    for piece in pieces:
        accumulator = combine.add_all(accumulator, piece)


def of_whole_runs(records: int = 50_000, rounds: int = 7, keys: int = _KEYS) -> list[dict[str, Any]]:
    """The processor time of bounded runs, in seconds, and the ratio of exact to rounding."""
    numbers = _numbers(records)["floats"]
    table = pa.table(
        {
            "key": [f"key-{number % keys}" for number in range(records)],
            "at": pa.array([number * _SECOND_US // 100 for number in range(records)], pa.int64()),
            "amount": numbers,
        }
    )
    inputs = {"dicts": table.to_pylist(), "Arrow": table}
    triggers = {"at the end": mp.AfterWatermark(), "each element": mp.Repeatedly(mp.AfterCount(1))}
    figures = []
    for form, rows in inputs.items():
        for shown, trigger in triggers.items():
            sums = (RoundingSum("amount"), mp.Sum("amount"))
            took = _in_turns([partial(_run, combine, trigger, rows) for combine in sums], rounds)
            ratio = statistics.median(exact / rounding for rounding, exact in zip(*took, strict=True))
            rounding, exact = map(statistics.median, took)
            figure = {"rows": form, "shown": shown, "records": records, "keys": keys}
            times = {"rounding_s": round(rounding, 3), "exact_s": round(exact, 3), "ratio": round(ratio, 3)}
            figures.append({**figure, **times})
    return figures


def _run(combine: mp.CombineFn, trigger: mp.Trigger, rows: Any) -> None:
    pipeline = mp.Pipeline("sums")
    amounts = pipeline.inject("amounts", key="key", at="at", at_unit="us", watermark=mp.Monotone())
    windowed = amounts.window(mp.FixedWindows("10m"), trigger=trigger, accumulation="accumulating")
    windowed.combine(combine, name="totals")
    with mp.Store.in_memory() as store:
        mp.LocalRunner(store, progress=False, upkeep=None).run(pipeline, {"amounts": rows})


def _in_turns(codes: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Processor seconds of each code in each round; the first round does not count."""
    took: list[list[float]] = [[] for _ in codes]
    # What the process had before is not looked at again in each round.
    gc.freeze()
    try:
        for number in range(rounds + 1):
            for code, times in zip(codes, took, strict=True):
                gc.collect()
                before = _processor_s()
                code()
                if number:
                    times.append(_processor_s() - before)
    finally:
        gc.unfreeze()
    return took


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--records", type=click.IntRange(100), default=50_000, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
def main(path: Path | None, records: int, rounds: int) -> None:
    """Measure, and print JSON."""
    figures = {
        "combiner": of_the_combiner(rounds=rounds),
        "runs": of_whole_runs(records, rounds),
    }
    tell_result(figures, path, indent=2)


if __name__ == "__main__":
    main()
