"""The figures as a table for people, as Markdown for a document, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks.peers.engines import ENGINES, QUESTIONS, Engine
from benchmarks.pictures import STYLE

_HEADINGS: Final = ("engine", "rows a batch", "without ids", "to Millpond", "with ids", "to Millpond")

_SLOWEST: Final = 1_000
_FASTEST: Final = 10_000_000
"""Ends of the picture's axis, the same in every panel, so that bars can be compared."""

Figures = Sequence[Mapping[str, Any]]


def table_rows(figures: Figures) -> list[tuple[str, ...]]:
    """Return the cells under `_HEADINGS` for each engine and size of batches.

    A ratio is an engine's rate divided by that of the first engine of its part, for the same batches and ids.
    """
    rates = {
        (one["engine"], one["batch"], one["with_ids"]): one.get("records_per_cpu_second") for one in figures
    }
    rows = []
    for engine in ENGINES:
        first = next(other for other in ENGINES if other.part == engine.part)
        for batch in dict.fromkeys(one["batch"] for one in figures if one["engine"] == engine.name):
            cells = [engine.title, f"{batch:,}"]
            for with_ids in (False, True):
                rate = rates.get((engine.name, batch, with_ids))
                reference = rates.get((first.name, batch, with_ids))
                cells.append("-" if rate is None else f"{rate:,}")
                cells.append("-" if rate is None or reference is None else _ratio(rate / reference))
            rows.append(tuple(cells))
    return rows


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def speed_table(figures: Figures) -> Table:
    """Return records a processor second, a row for each engine and size of batches."""
    table = Table(title="Records a processor second", header_style="dim", box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    for row in table_rows(figures):
        table.add_row(*row)
    return table


def gives_table(engines: Sequence[Engine] = ENGINES) -> Table:
    """Return what the engines give besides a sum."""
    table = Table(title="What they give besides", header_style="dim", box=None, pad_edge=False)
    for heading in ("engine", *QUESTIONS.values()):
        table.add_column(heading)
    for engine in engines:
        table.add_row(engine.title, *(getattr(engine.gives, name) for name in QUESTIONS))
    return table


def reasons(figures: Figures) -> list[str]:
    """Return why engines have no figure, a line each."""
    titles = {engine.name: engine.title for engine in ENGINES}
    lines = [f"{titles[one['engine']]}: {one['reason']}" for one in figures if "reason" in one]
    return list(dict.fromkeys(lines))


def markdown(figures: Figures) -> str:
    """Return both tables as Markdown."""
    gives = [
        (engine.title, *(getattr(engine.gives, name) for name in QUESTIONS))
        for engine in ENGINES
        if any(one["engine"] == engine.name for one in figures)
    ]
    return "\n\n".join(
        [
            _markdown_table(_HEADINGS, table_rows(figures)),
            _markdown_table(("engine", *QUESTIONS.values()), gives),
        ]
    )


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(figures: Figures, path: Path) -> None:
    """Draw the rates as bars, a panel for each part and size of batches."""
    panels = list(dict.fromkeys((one["part"], one["batch"]) for one in figures))
    heights = [len({one["engine"] for one in figures if _panel_of(one) == panel}) + 0.8 for panel in panels]
    with mpl.rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(7.4, 0.62 * sum(heights) + 0.6), layout="constrained")
        rows = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for panel, (axes,) in zip(panels, rows, strict=True):
            part, batch = panel
            shown = [engine for engine in ENGINES if engine.part == part and _has(figures, engine, batch)]
            for with_ids, offset in ((False, -0.2), (True, 0.2)):
                for place, engine in enumerate(shown):
                    rate = _rate(figures, engine, batch, with_ids=with_ids)
                    if rate is not None:
                        bar = axes.barh(place + offset, rate, height=0.36, color="C0" if with_ids else "0.6")
                        axes.bar_label(bar, labels=[f"{rate:,}"], padding=3, fontsize=8)
            axes.set(xscale="log", yticks=range(len(shown)), yticklabels=[engine.title for engine in shown])
            axes.set_title(
                f"{'local' if part == 'local' else 'on Spark'}, {batch:,} rows a batch", loc="left"
            )
            axes.set(xlim=(_SLOWEST, _FASTEST), ylim=(len(shown) - 0.4, -0.6))
        rows[-1][0].set_xlabel("records a processor second (grey: without ids, blue: with ids)")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})


def _panel_of(figure: Mapping[str, Any]) -> tuple[str, int]:
    return figure["part"], figure["batch"]


def _has(figures: Figures, engine: Engine, batch: int) -> bool:
    return any(_rate(figures, engine, batch, with_ids=with_ids) is not None for with_ids in (False, True))


def _rate(figures: Figures, engine: Engine, batch: int, *, with_ids: bool) -> int | None:
    for one in figures:
        if (one["engine"], one["batch"], one["with_ids"]) == (engine.name, batch, with_ids):
            return one.get("records_per_cpu_second")
    return None
