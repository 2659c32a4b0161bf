"""The time of a run over one key, by the number of its windows.

One key has a record in each of W windows: fixed, sliding, sessions and unaligned, on sorted bounded
input, whose windows close during the run, and fixed ones that all stay open to the end. Each figure is the
processor time of a run in a fresh process, without start and import; ``against_linear`` divides it by ten times the
figure for a tenth of the windows.

    python -m benchmarks.windows_of_a_key --json build/bench/windows_of_a_key.json \
        --picture docs/pictures/windows_of_a_key.png
"""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import matplotlib as mpl
import pyarrow as pa
from matplotlib.figure import Figure

import millpond as mp
from benchmarks.json_result import tell_result
from benchmarks.pictures import STYLE

_MINUTE_US: Final = 60_000_000
_COUNTS: Final = (1_000, 10_000, 100_000)

SHAPES: Final[Mapping[str, tuple[Callable[[], mp.WindowFn], Callable[[], mp.types.WatermarkPolicy]]]] = {
    "fixed": (lambda: mp.FixedWindows("1m"), mp.Monotone),
    "sliding": (lambda: mp.SlidingWindows("2m", "1m"), mp.Monotone),
    "sessions": (lambda: mp.Sessions("30s"), mp.Monotone),
    "unaligned": (lambda: mp.windows.UnalignedFixedWindows("1m"), mp.Monotone),
    "fixed, all open to the end": (lambda: mp.FixedWindows("1m"), mp.Perfect),
}
"""Window functions by name, and the watermark of their input."""


def run_once(shape: str, windows: int) -> dict[str, Any]:
    """Run ``windows`` records of one key, one a minute, and return the processor time in seconds."""
    window_fn, watermark = SHAPES[shape]
    pipeline = mp.Pipeline("one_key")
    records = pipeline.inject("records", key="key", at="at", at_unit="us", watermark=watermark())
    records.window(window_fn()).combine(mp.Count(), name="counts")
    rows = pa.table({"key": ["only"] * windows, "at": [_MINUTE_US * number for number in range(windows)]})
    with tempfile.TemporaryDirectory(prefix="millpond-windows-") as folder, mp.Store.open(folder) as store:
        runner = mp.LocalRunner(store, progress=False, upkeep=None)
        before = resource.getrusage(resource.RUSAGE_SELF)
        summary = runner.run(pipeline, {"records": rows})
        after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "shape": shape,
        "windows": windows,
        "panes": summary.totals.productions,
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3),
        "elapsed_s": round(summary.elapsed_ms / 1_000, 3),
    }


def measure(counts: Sequence[int] = _COUNTS, shapes: Sequence[str] = tuple(SHAPES)) -> list[dict[str, Any]]:
    """Measure each shape at each number of windows, each in a separate process."""
    figures: list[dict[str, Any]] = []
    for shape in shapes:
        for number, windows in enumerate(counts):
            figure = _in_a_process(shape, windows)
            if number:
                last, factor = figures[-1], windows / counts[number - 1]
                figure["against_linear"] = round(figure["cpu_s"] / (last["cpu_s"] * factor), 3)
            figures.append(figure)
    return figures


def _in_a_process(shape: str, windows: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        # The first run pays for imports.
        pool.submit(run_once, shape, 10).result()
        return pool.submit(run_once, shape, windows).result()


def draw(figures: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw processor time over the number of windows, and what linear would be."""
    with mpl.rc_context(dict(STYLE)):
        figure = Figure(figsize=(7, 4.2), layout="constrained")
        axes = figure.add_subplot()
        for shape in dict.fromkeys(entry["shape"] for entry in figures):
            points = [(one["windows"], one["cpu_s"]) for one in figures if one["shape"] == shape]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.3, label=shape)
        counts = sorted({entry["windows"] for entry in figures})
        top = max(entry["cpu_s"] for entry in figures if entry["windows"] == counts[-1])
        linear = [top * count / counts[-1] for count in counts]
        axes.plot(counts, linear, color="0.6", linestyle="--", linewidth=1, label="linear")
        axes.set(xscale="log", yscale="log", xlabel="windows of one key", ylabel="processor time, seconds")
        axes.legend(frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})


@click.command(help=__doc__)
@click.option(
    "--json", "path", type=click.Path(path_type=Path), default=None, help="Write the figures there."
)
@click.option("--picture", type=click.Path(path_type=Path), default=None, help="Draw them there.")
@click.option("--windows", type=click.IntRange(10), multiple=True, default=_COUNTS, show_default=True)
@click.option("--shape", "shapes", type=click.Choice(list(SHAPES)), multiple=True, default=tuple(SHAPES))
def main(path: Path | None, picture: Path | None, windows: tuple[int, ...], shapes: tuple[str, ...]) -> None:
    """Measure, print JSON, draw."""
    figures = measure(windows, shapes)
    tell_result({"figures": figures}, path, indent=2)
    if picture is not None:
        draw(figures, picture)


if __name__ == "__main__":
    main()
