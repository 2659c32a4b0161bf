"""Results of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.json_result import tell_result


@pytest.mark.parametrize("indent", [None, 2])
def test_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], indent: int | None
) -> None:
    found, path = {"rows": 3, "rates": [1.5, 2.5]}, tmp_path / "build" / "found.json"
    tell_result(found, path, indent=indent)
    printed = capsys.readouterr().out
    assert json.loads(printed) == found
    assert path.read_text(encoding="utf-8") == printed
    tell_result(found, None, indent=indent)
    assert capsys.readouterr().out == printed
