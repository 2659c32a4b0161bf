"""When each of ten companies was mentioned in tweets, by five minutes, and the slow way to find their silences."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Final

HOUR: Final = timedelta(hours=1)
_FILE: Final = Path(__file__).with_name("mentions.json")


def load_mentions() -> dict[str, list[datetime]]:
    """The five minutes in which each company was mentioned, in the order of time."""
    data = json.loads(_FILE.read_text())
    step = timedelta(seconds=data["step_seconds"])
    mentions: dict[str, list[datetime]] = {}
    for company, series in data["series"].items():
        at, times = datetime.fromisoformat(series["first"]), list[datetime]()
        for count, is_mentioned in zip(series["runs"], cycle([True, False]), strict=False):
            times += [at + number * step for number in range(count)] if is_mentioned else []
            at += count * step
        mentions[company] = times
    return mentions


def load_published(folder: Path) -> dict[str, list[datetime]]:
    """The same from the files of the Numenta Anomaly Benchmark."""
    mentions: dict[str, list[datetime]] = {}
    for path in sorted(folder.glob("Twitter_volume_*.csv")):
        with path.open(newline="") as file:
            mentions[path.stem.removeprefix("Twitter_volume_")] = [
                datetime.fromisoformat(row["timestamp"]).replace(tzinfo=UTC)
                for row in csv.DictReader(file)
                if float(row["value"])
            ]
    return mentions


def rows_of(mentions: Mapping[str, Sequence[datetime]]) -> list[dict[str, Any]]:
    """All mentions as rows, in the order of time."""
    rows = [{"company": company, "at": at} for company, times in mentions.items() for at in times]
    return sorted(rows, key=lambda row: (row["at"], row["company"]))


def silences(
    mentions: Mapping[str, Sequence[datetime]], least: timedelta = HOUR
) -> list[tuple[str, datetime]]:
    """The last mention before each silence of at least this long, the one after the last of all included.

    It sorts, and looks at each pause: nothing of this is how the engine finds them.
    """
    found: list[tuple[str, datetime]] = []
    for company, unordered in mentions.items():
        times = sorted(unordered)
        found += [(company, last) for last, following in pairwise(times) if following - last >= least]
        found += [(company, times[-1])] if times else []
    return sorted(found)
