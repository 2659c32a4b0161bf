"""Hostile stores and inputs by the thousand: ``python -m tests.hostile --seeds 20000``.

Each seed is one damaged store, every third one an input, and its commands. Worker processes run the seeds; a
worker that hangs or dies is reported with its seed, and replaced. The exit code is 1 after a problem. ``--seed N``
runs one seed and shows its damage.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final, TextIO, get_args

import click

from millpond.statestore.system import SystemClock
from tests.hostile.arena import Arena, Case, Kind

_SHOWN: Final = 40


@click.command()
@click.option("--seeds", default=200, show_default=True, help="How many cases.")
@click.option("--from", "first", default=0, show_default=True, help="The first seed.")
@click.option("--seed", "only", type=int, help="Only this one, told in full.")
@click.option("--only", "kind", type=click.Choice(get_args(Kind)), help="Cases of this kind only.")
@click.option("--workers", default=2, show_default=True)
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write one JSON object a problem to this file."
)
@click.option(
    "--in", "place", type=click.Path(path_type=Path), hidden=True, help="Work in this folder, as a worker."
)
def main(
    seeds: int,
    first: int,
    only: int | None,
    kind: Kind | None,
    workers: int,
    report: Path | None,
    place: Path | None,
) -> None:
    """Run commands on damaged stores and hostile inputs, and report their forbidden actions."""
    if place is not None:
        _work(place, first, seeds, kind)
        return
    with tempfile.TemporaryDirectory() as folder:
        if only is not None:
            arena = Arena(Path(folder))
            arena.prepare()
            click.echo(json.dumps(asdict(arena.run(only, kind)), indent=1))
            return
        started_us = SystemClock().monotonic_us()
        share = -(-seeds // workers)
        shares = [
            Share(Path(folder) / str(n), first + n * share, min(share, seeds - n * share), kind)
            for n in range(workers)
        ]
        for each in shares:
            each.start()
        # A thread for each share, because a worker stops when nobody reads its results.
        with ThreadPoolExecutor(workers) as pool:
            problems = [problem for found in pool.map(Share.finish, shares) for problem in found]
        if report is not None:
            report.write_text("".join(f"{json.dumps(problem)}\n" for problem in problems), encoding="utf-8")
    kinds = Counter(kind for problem in problems for kind in {_kind(text) for text in problem["problems"]})
    for text, count in kinds.most_common(_SHOWN):
        click.echo(f"{count:6}  {text[:400]}")
    seconds = (SystemClock().monotonic_us() - started_us) / 1e6
    most = max((each.memory_mib for each in shares), default=0)
    click.echo(
        f"{seeds} cases in {seconds:.0f} s, {len(problems)} with problems; at most {most} MiB a command"
    )
    sys.exit(bool(problems))


def _kind(text: str) -> str:
    """Return a problem without the command and the names that differ from store to store."""
    return re.sub(r"'[^']*'", "'…'", text.partition(": ")[2] or text)


def _work(folder: Path, first: int, seeds: int, kind: Kind | None) -> None:
    # Commands print to the streams of click's runner, so this process's own stream carries the results.
    results: TextIO = sys.__stdout__ or sys.stdout
    folder.mkdir(exist_ok=True)
    arena = Arena(folder)
    arena.prepare()
    for seed in range(first, first + seeds):
        print(json.dumps({"seed": seed}), file=results, flush=True)
        print(json.dumps(asdict(arena.run(seed, kind))), file=results, flush=True)


class Share:
    """The seeds of one worker, which is replaced when it ends before them."""

    def __init__(self, folder: Path, first: int, seeds: int, kind: Kind | None) -> None:
        self._folder, self._next, self._end = folder, first, first + seeds
        self._only = () if kind is None else ("--only", kind)
        self._process: subprocess.Popen[str] | None = None
        self.memory_mib = 0

    def start(self) -> None:
        """Start a worker on the remaining seeds."""
        self._folder.mkdir(exist_ok=True)
        self._errors = self._folder.with_suffix(".stderr")
        with self._errors.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.hostile", "--in", str(self._folder),
                    "--from", str(self._next), "--seeds", str(self._end - self._next), *self._only,
                ],
                stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def finish(self) -> list[dict[str, list[str]]]:
        """Wait for the last seed; return the problems."""
        problems = []
        while self._next < self._end:
            begun = None
            for line in self._lines():
                told = json.loads(line)
                begun = told["seed"]
                if "problems" in told:
                    self._next, begun = begun + 1, None
                    self.memory_mib = max(self.memory_mib, told["memory_mib"])
                    if told["problems"]:
                        problems.append(told)
            if self._next < self._end:
                last = self._errors.read_text(encoding="utf-8", errors="replace")[-3_000:]
                code = self._process.returncode if self._process else None
                ended = asdict(Case(self._next if begun is None else begun)) | {
                    "problems": [f"the worker ended with {code}, in the middle of seed {begun}"],
                    "stderr": last,
                }
                click.echo(last, err=True)
                problems.append(ended)
                self._next += 1
                self.start()
        return problems

    def _lines(self) -> list[str]:
        assert self._process is not None
        assert self._process.stdout is not None
        lines = [line for line in self._process.stdout if line.startswith("{")]
        self._process.wait()
        return lines


if __name__ == "__main__":
    main()
