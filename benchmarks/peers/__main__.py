"""Windowed sums by key and ten minutes: Millpond beside Spark's own windows, Pathway, Bytewax and Polars.

Each engine sums 500,000 records of 10,000 keys, about three in each window, in batches, in a process of its own, one
engine after the other; on Spark two million, and four in large batches. A figure is records a second of processor time
of the process and all of its children, after a warm-up. Every pane is compared with the sums of a group-by; an engine
with a wrong pane has no figure. Pathway, Bytewax and Polars run in environments of their own under build/peers, which
the first run makes out of pinned requirements.

    python -m benchmarks.peers --json build/bench/peers.json --picture docs/pictures/peers.png

The engines of the part ``local`` are compared with Millpond's local runner, those of ``spark`` with Millpond on Spark.
Figures that a run does not measure stay in the JSON.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console

from benchmarks.peers.engines import ENGINES, LOADS, PARTS, QUICK_LOADS, Part
from benchmarks.peers.measured import measure
from benchmarks.peers.report import draw, gives_table, markdown, reasons, speed_table


@click.command(help=__doc__)
@click.option("--json", "path", type=click.Path(path_type=Path), default=Path("build/bench/peers.json"))
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the figures there.")
@click.option("--markdown", "document", type=click.Path(path_type=Path), help="Write the tables there.")
@click.option(
    "--only",
    type=click.Choice(PARTS),
    multiple=True,
    help="Measure this part.",
)
@click.option("--with-ids/--without-ids", "with_ids", default=None, help="Measure only these runs.")
@click.option("--quick", is_flag=True, help="Fewer records, and on Spark batches of 50,000 alone.")
@click.option("--environments", type=click.Path(path_type=Path), default=Path("build/peers"))
def main(
    path: Path,
    picture: Path | None,
    document: Path | None,
    only: tuple[str, ...],
    with_ids: bool | None,
    quick: bool,
    environments: Path,
) -> None:
    """Measure, write the JSON, print tables."""
    console = Console()
    parts = cast(tuple[Part, ...], only) or PARTS
    ids = (False, True) if with_ids is None else (with_ids,)
    figures = [one for one in _figures_in(path) if one["part"] not in parts or one["with_ids"] not in ids]
    for part in parts:
        engines = [engine for engine in ENGINES if engine.part == part]
        loads = QUICK_LOADS[part] if quick else LOADS[part]
        figures += measure(part, engines, environments, lambda title: console.print(f"{title} …"), loads, ids)
    figures.sort(key=lambda figure: PARTS.index(figure["part"]))
    report = {
        "cores": os.cpu_count(),
        "figures": figures,
        "gives": {engine.name: asdict(engine.gives) for engine in ENGINES},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{json.dumps(report, indent=2)}\n", encoding="utf-8")
    console.print(speed_table(figures))
    console.print(gives_table([engine for engine in ENGINES if engine.part in parts]))
    for line in reasons(figures):
        console.print(f"No figure of {line}")
    if picture is not None:
        draw(figures, picture)
    if document is not None:
        document.write_text(f"{markdown(figures)}\n", encoding="utf-8")
    console.print(f"Every figure is in {path}.")


def _figures_in(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return cast(list[dict[str, Any]], json.loads(path.read_text(encoding="utf-8"))["figures"])


if __name__ == "__main__":
    main()
