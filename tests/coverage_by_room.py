"""The share of branches and lines that the tests run, room by room: ``python -m tests.coverage_by_room``.

Reads the report of `make coverage`, and compares it with the goals in pyproject.toml.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import orjson

from tests.tidy import ROOT

REPORT: Final = "build/coverage/report.json"
_COUNTS: Final = ("num_statements", "covered_lines", "num_branches", "covered_branches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The covered share of a room, or of a room within it.

    Attributes:
        room: its folder.
        statements: lines of code in it.
        branches: ways that its branches may go.
        percent: the share of both that tests take, as coverage.py counts.
        percent_of_branches: the same of branches alone; 100 where there are none.
        goal: what ``percent`` should be.
    """

    room: str
    statements: int
    branches: int
    percent: float
    percent_of_branches: float
    goal: float

    @property
    def is_below(self) -> bool:
        """Return True if the goal is not met."""
        return self.percent < self.goal


def by_room(report: Mapping[str, Any], goals: Mapping[str, float]) -> Iterator[Share]:
    """Return the shares of all rooms, each followed by its inner rooms.

    Args:
        report: coverage.py's JSON report.
        goals: percent by room; ``default`` applies to all others.
    """
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path, file in report["files"].items():
        folders = path.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            counts["/".join(folders[:depth])].update({name: file["summary"][name] for name in _COUNTS})
    for room in sorted(counts):
        count = counts[room]
        yield Share(
            room=room,
            statements=count["num_statements"],
            branches=count["num_branches"],
            percent=_percent(
                count["covered_lines"] + count["covered_branches"],
                count["num_statements"] + count["num_branches"],
            ),
            percent_of_branches=_percent(count["covered_branches"], count["num_branches"]),
            goal=goals.get(room.partition("/")[0], goals["default"]),
        )


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 100.0


def lines(shares: list[Share]) -> Iterator[str]:
    """Return the table; inner rooms are indented, and shares below their goal are marked."""
    yield f"{'room':<28} {'lines':>7} {'branches':>9} {'taken':>8} {'of branches':>12} {'goal':>6}"
    for share in shares:
        name = "  " * share.room.count("/") + share.room.rpartition("/")[2]
        mark = "  below" if share.is_below else ""
        yield (
            f"{name:<28} {share.statements:>7,} {share.branches:>9,} {share.percent:>7.1f}% "
            f"{share.percent_of_branches:>11.1f}% {share.goal:>5.0f}%{mark}"
        )


@click.command()
@click.option("--check", is_flag=True, help="End with 1 when a room is below its goal.")
@click.option(
    "--report", type=click.Path(path_type=Path), default=ROOT / REPORT, help="coverage.py's JSON report."
)
@click.pass_context
def main(context: click.Context, report: Path, *, check: bool) -> None:
    """Print the share of each room that the tests run."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shares = list(by_room(orjson.loads(report.read_bytes()), project["tool"]["millpond"]["coverage-goals"]))
    for line in lines(shares):
        click.echo(line)
    below = [share.room for share in shares if share.is_below and "/" not in share.room]
    click.echo(f"below their goals: {', '.join(below)}" if below else "every room meets its goal")
    context.exit(1 if check and below else 0)


if __name__ == "__main__":
    main()
