"""The transcript command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from millpond.testing.transcripts.command import failure_of, failures_of, main
from millpond.testing.transcripts.runs import LocalTranscriptRun

_GOOD = """
name: good
window_fn: FixedWindows(10)
broken_on: [SomeRunner]
transcript:
  - input: [1]
  - state: {present: [[0, 9]]}
  - watermark: 10
  - expect: [{values: [1]}]
"""

_BAD = """
name: bad
window_fn: FixedWindows(10)
transcript:
  - input: [1]
  - watermark: 10
"""


def test_command_prints_line_for_each_document(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(f"{_GOOD}---\n{_BAD}", encoding="utf-8")
    result = CliRunner().invoke(main, [str(path)])
    lines = result.output.splitlines()

    assert lines[0] == "ok good"
    assert lines[1].startswith("FAILED bad: Unexpected output")
    assert lines[2] == "1 passed, 1 failed"
    assert result.exit_code == 1


def test_command_exits_with_0_when_all_pass(tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(_GOOD, encoding="utf-8")

    assert CliRunner().invoke(main, [str(path), "--restart"]).exit_code == 0


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"name: [a\n", ":2"),
        (b"name: a\n---\n{\n", ":4"),
        (b"a: 1\n\tb: 2", ":2"),
        (b"a: !!python/object:os.system b", ":1"),
        (b"a: *b", ":1"),
        (b"\xfc", ""),
        (b"a: \x01", ""),
        (b"a: 2024-99-99", ""),
        (b"a: !!timestamp soon", ""),
    ],
)
def test_bad_yaml_is_told_with_file_and_line(tmp_path: Path, data: bytes, line: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_bytes(data)
    result = CliRunner().invoke(main, [str(path)])

    assert result.exit_code == 2
    assert f"Error: a transcript must be YAML file=`{path}{line}` reason=`" in result.output


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("no mapping", "a transcript is a mapping"),
        ({"transcript": [5]}, "a step is one word"),
        ({"transcript": [{"input": 5}]}, "an input is a list"),
        ({"transcript": [{"input": [None]}]}, "an element is a time"),
        ({"transcript": [{"input": [{"colour": 5}]}]}, "an element is a time"),
        ({"transcript": [{"clock": -1}]}, "The clock goes back"),
        ({"transcript": [{"watermark": "soon"}]}, "a watermark is a number"),
        ({"error": "Unmatched", "transcript": []}, "passed, but should fail"),
        ({"error": "Unmatched", "transcript": [{"clock": -1}]}, "failed with The clock goes back"),
    ],
    ids=repr,
)
def test_failed_document_has_reason(document: Any, why: str) -> None:
    assert why in str(failure_of(document, LocalTranscriptRun))


def test_parallel_documents_have_own_time() -> None:
    slow = {
        "trigger_fn": "Repeatedly(AtPeriod(0, 60))",
        "transcript": [{"input": [1]}, {"clock": 60}, {"expect": [{"values": [1], "produced": 60}]}],
    }
    fast = {
        "window_fn": "FixedWindows(10)",
        "trigger_fn": "AfterProcessingTime(7)",
        "transcript": [
            {"input": [1]},
            {"clock": 7},
            {"expect": [{"values": [1], "produced": 7}]},
            {"watermark": 100},
            {"input": [2]},
            {"expect_dropped": 1},
        ],
    }
    bad = {"window_fn": "FixedWindows(10)", "transcript": [{"input": [1]}, {"watermark": 10}]}
    refused = {"trigger_fn": "AfterTea", "transcript": []}
    failures = failures_of([slow, bad, refused, fast], LocalTranscriptRun)

    assert [failures[0], failures[3]] == [None, None]
    assert str(failures[1]).startswith("Unexpected output")
    assert "no window function and no trigger" in str(failures[2])


def test_file_without_a_transcript_is_an_error(tmp_path: Path) -> None:
    """Otherwise a check of nothing passes."""
    path = tmp_path / "some.yaml"
    path.write_text("---\n", encoding="utf-8")
    result = CliRunner().invoke(main, [str(path)])

    assert (result.exit_code, f"no transcript is in {path}" in result.output) == (2, True)
