"""Half a year of a store: nothing grows with its age."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from benchmarks.requests import CLOCK
from benchmarks.year import Year, live_through

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

MONTHS: Final = 6
A_DAY: Final = 20
# A quarter of the supersteps give a row to each sink, and each sixteenth of its commits is followed by a compaction.
SINK_COMMITS_A_DAY: Final = A_DAY / 4 * 17 / 16
VERSIONS_A_CLEANUP: Final = 10 * 16
SMALL_FILE_BYTES: Final = 8_192


@pytest.mark.timeout(900)
def test_nothing_grows_with_age(tmp_path: Path) -> None:
    year = Year(tmp_path, 360 * A_DAY, 4_000, CLOCK.now_us())
    months = list(live_through(year, MONTHS))
    year.stop()

    for month in months[1:]:
        _check_store(month)
        _check_sink(
            {name.removeprefix("sink_append_"): value for name, value in month.items()}, live_files=30
        )
        _check_sink({name.removeprefix("sink_upsert_"): value for name, value in month.items()}, live_files=4)
    # Caches fill in the first months.
    for name in ("txns", "other_files", "threads", "descriptors", "memory_mib", "files_per_superstep"):
        assert months[-1][name] <= 1.25 * months[2][name], (name, [month[name] for month in months])


def _check_store(month: dict[str, Any]) -> None:
    # Twice the live bytes, and the small files of the 64 versions until the next round.
    assert month["disk_ratio"] <= 2 + 64 * SMALL_FILE_BYTES / month["live_bytes"], month
    assert month["live_files"] <= 128
    # A round comes after at most 64 versions while much is replaced, and keeps what the round before could not delete.
    assert month["entries"] <= 3 * 64
    # Three savepoints are open, each of a version with some files that are no longer live.
    assert month["files"] <= month["live_files"] + month["stale_files"] + 3 * 64
    assert month["checkpoints"] <= 12
    assert month["checkpoint_bytes"] <= 40_000
    assert month["other_files"] <= 12
    # The last checkpoint, what is new since, and, at a start, the live files and what is new in the sinks.
    assert month["opening_files"] <= 20 + month["new_entries"]
    assert month["start_files"] <= 64 + month["new_entries"] + month["live_files"]


def _check_sink(month: dict[str, Any], *, live_files: int) -> None:
    assert month["live_files"] <= live_files
    assert month["stale_files"] <= 2 * VERSIONS_A_CLEANUP
    assert month["entries"] <= 30 * SINK_COMMITS_A_DAY + 2 * VERSIONS_A_CLEANUP
    assert month["checkpoint_bytes"] <= 40_000
