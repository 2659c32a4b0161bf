"""The table of coverage by room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from click.testing import CliRunner

from tests.coverage_by_room import by_room, main


def file(statements: int, lines: int, branches: int, taken: int) -> dict[str, Any]:
    counts = {"num_statements": statements, "covered_lines": lines}
    return {"summary": {**counts, "num_branches": branches, "covered_branches": taken}}


REPORT = {
    "files": {
        "statestore/store.py": file(10, 10, 10, 10),
        "statestore/log/log.py": file(60, 50, 20, 10),
        "gc/compaction.py": file(100, 95, 0, 0),
    }
}


def test_rooms_add_up_their_contents() -> None:
    """Lines and branches are counted together."""
    shares = {share.room: share for share in by_room(REPORT, {"default": 95, "statestore": 98})}

    assert list(shares) == ["gc", "statestore", "statestore/log"]
    assert (shares["statestore"].percent, shares["statestore/log"].percent) == (80.0, 75.0)
    assert (shares["statestore"].percent_of_branches, shares["gc"].percent_of_branches) == (
        100 * 20 / 30,
        100.0,
    )


def test_room_may_have_another_goal() -> None:
    """Its inner rooms share the goal, others have the default."""
    shares = {share.room: share for share in by_room(REPORT, {"default": 95, "statestore": 98})}

    assert (shares["statestore/log"].goal, shares["gc"].goal) == (98, 95)
    assert (shares["statestore/log"].is_below, shares["gc"].is_below) == (True, False)


def test_check_names_rooms_below_their_goals(tmp_path: Path) -> None:
    """Without the check, the exit code is 0."""
    report = tmp_path / "report.json"
    report.write_bytes(orjson.dumps(REPORT))
    told = CliRunner().invoke(main, ["--report", str(report)])
    checked = CliRunner().invoke(main, ["--report", str(report), "--check"])

    assert "below their goals: statestore" in told.stdout
    assert (told.exit_code, checked.exit_code) == (0, 1)
