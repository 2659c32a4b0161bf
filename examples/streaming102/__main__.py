"""``python -m examples.streaming102``: the figures of *Streaming 102*, run and drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from examples.quiet_spark import quiet_spark
from examples.streaming102.article import stories
from examples.streaming102.figures import FIGURES, Figure, Panel, differences, play_figures
from examples.streaming102.picture import draw
from examples.streaming102.play import Shown
from examples.streaming102.story import clock_text

_HELP = """
Run the ten scores of *Streaming 102* through a pipeline for each figure, and draw what comes out.

The article asks four questions: WHAT is computed (here always a sum), WHERE in event time (windows), WHEN it is shown
(triggers), and HOW the panes of one window relate (accumulation). The figures change one answer at a time:

\b
   2  a global window, in batch                          one sum of everything
   4  fixed windows of two minutes, in batch             WHERE: four sums
   6  shown when the watermark passes the window's end   WHEN: a perfect watermark is slow, a heuristic one wrong
   7  early every minute, on time, late at once          WHEN: both too slow and too wrong are mended
   8  one minute of allowed lateness                     WHEN: windows end; the 9 comes too late
   9  discarding                                         HOW: panes add up
  10  accumulating and retracting                        HOW: each pane takes back the one before
  13  two orders of arrival, windows in event time       the same four results
  14  two orders, a firing every two minutes             processing time: other results
  15  two orders, event time := arrival                  processing time once more, as event time
  17  sessions, retracting                               WHERE: windows that follow the data and merge

\b
  python -m examples.streaming102                           all of them, into build/streaming102
  python -m examples.streaming102 --figure 7                one; may be given again
  python -m examples.streaming102 --figure 10 --runner spark

In a picture, event time runs to the right and processing time upwards. A circle is a score; a box is a pane, as wide as
its window, with the sum at the time at which it was shown; the green line is the watermark. Each pane that is
printed is held against the article's, to the second; exit code 1 if one differs. The scores and what the article shows
are in the example's own article.yaml.
"""


@click.command(help=_HELP)
@click.option(
    "--figure",
    "numbers",
    type=click.Choice([str(number) for number in FIGURES]),
    multiple=True,
    help="Which figure; all unless given.",
)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/streaming102"), show_default=True)
@click.option("--runner", type=click.Choice(["local", "spark"]), default="local", show_default=True)
def main(numbers: tuple[str, ...], out: Path, runner: str) -> None:
    """Run the figures, print their panes, draw them."""
    console = Console()
    spark = None
    if runner == "spark":
        spark = quiet_spark("streaming102", master="local[2]", log=out / "spark.log")
    wanted = [int(number) for number in numbers] or list(FIGURES)
    wrong = 0
    for number, panels in play_figures(wanted, spark).items():
        figure = FIGURES[number]
        path = out / f"figure_{number:02}.png"
        console.print(f"\n[bold]Figure {number}: {figure.title}[/bold]")
        for panel, shown in panels:
            wrong += _print_panel(console, figure, panel, shown)
        _draw(path, figure, panels)
        console.print(f"  drawn: {path}")
    if spark is not None:
        spark.stop()
    sys.exit(1 if wrong else 0)


def _draw(path: Path, figure: Figure, panels: Sequence[tuple[Panel, Sequence[Shown]]]) -> None:
    told = [(panel.title, stories()[panel.story], shown, panel.note) for panel, shown in panels]
    draw(path, figure.title, told, caption=f"Figure {figure.number} of “Streaming 102”, by a run of Millpond")


def _print_panel(console: Console, figure: Figure, panel: Panel, shown: list[Shown]) -> int:
    table = Table(title=panel.title, title_justify="left", title_style="")
    for column in ("shown at", "window", "sum", "pane"):
        table.add_column(column, justify="right" if column == "sum" else "left")
    for one in shown:
        window = "global" if one.window is None else " to ".join(map(clock_text, one.window))
        value = f"\N{MINUS SIGN}{one.value}" if one.is_retraction else str(one.value)
        kind = "retraction" if one.is_retraction else one.timing.replace("_", " ")
        table.add_row(clock_text(one.seen_us), window, value, kind)
    found = differences(figure.expected(panel), shown)
    console.print(table)
    console.print(
        "  " + ("\n  ".join(found) or "as in the article" + (f"; {panel.note}" if panel.note else ""))
    )
    return len(found)


if __name__ == "__main__":
    main()
