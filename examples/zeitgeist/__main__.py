"""``python -m examples.zeitgeist``: run the job on a year of flights, and show its alerts.

Kill it at any time and restart it: it continues, and the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

import millpond as mp
from examples.zeitgeist.demo import Demo, forget, run
from examples.zeitgeist.job import zeitgeist

_DAY = click.DateTime(["%Y-%m-%d"])


@click.command(help=__doc__)
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/demo"), show_default=True)
@click.option("--store", type=click.Path(path_type=Path), help="The store; OUTPUT/pond unless given.")
@click.option("--fresh", is_flag=True, help="Forget what an earlier run has done.")
@click.option("--first", type=_DAY, help="First day of flights; all of 2013 unless given.")
@click.option("--last", type=_DAY, help="Last day of flights.")
@click.option("--flights-per-file", type=click.IntRange(1), default=5_000, show_default=True)
@click.option("--files-per-trigger", type=click.IntRange(1), default=1, show_default=True)
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@click.pass_obj
def main(
    pipeline: Callable[[Path], mp.Pipeline] | None,
    output: Path,
    store: Path | None,
    fresh: bool,
    first: datetime | None,
    last: datetime | None,
    flights_per_file: int,
    files_per_trigger: int,
    master: str,
) -> None:
    """Run the demo; ``main(obj=...)`` runs it with another pipeline."""
    demo = Demo(
        output=output,
        store=store or output / "pond",
        first=first.date() if first else None,
        last=last.date() if last else None,
        flights_per_file=flights_per_file,
        files_per_trigger=files_per_trigger,
        master=master,
        pipeline=pipeline or zeitgeist,
    )
    if fresh:
        forget(demo)
    run(demo, Console())


if __name__ == "__main__":
    main()
