"""The log of Spark's file source in a fork."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.executor.replay.spark_checkpoint import forget_later_files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Lay out a checkpoint after batches 0 to 5 of one file each; 2 and 5 are compactions."""
    (tmp_path / "read me").mkdir()
    (tmp_path / "checkpoint" / "offsets").mkdir(parents=True)
    source = tmp_path / "checkpoint" / "sources" / "0"
    source.mkdir(parents=True)
    lines = []
    for batch in range(6):
        file = tmp_path / "read me" / f"{batch}.json"
        file.touch()
        lines.append(json.dumps({"path": file.as_uri(), "timestamp": batch, "batchId": batch}))
        is_compaction = batch % 3 == 2
        log = source / (f"{batch}.compact" if is_compaction else str(batch))
        log.write_text("\n".join(["v1", *(lines if is_compaction else lines[-1:])]))
        log.with_name(f".{log.name}.crc").write_text("x")
        (tmp_path / "checkpoint" / "offsets" / str(batch)).write_text(f'v1\n{{}}\n{{"logOffset":{batch}}}')
    return tmp_path / "checkpoint"


def notes(checkpoint: Path) -> dict[str, list[int]]:
    """Map the files of the log to their batches."""
    return {
        path.name: [json.loads(line)["batchId"] for line in path.read_text().splitlines()[1:]]
        for path in (checkpoint / "sources" / "0").iterdir()
        if not path.name.startswith(".")
    }


@pytest.mark.parametrize("batch", [0, 1, 2, 4])
def test_later_files_are_removed_from_the_log(checkpoint: Path, batch: int) -> None:
    """One file of the log remains, even where Spark has deleted files that a compaction contains."""
    for removed in ("0", "1"):
        (checkpoint / "sources" / "0" / removed).unlink()
    forget_later_files(checkpoint, batch)

    assert notes(checkpoint) == {f"{batch}.compact": list(range(batch + 1))}
    assert not list((checkpoint / "sources" / "0").glob(".*"))


def test_log_of_a_query_without_batches_is_emptied(checkpoint: Path) -> None:
    forget_later_files(checkpoint, -1)
    assert notes(checkpoint) == {}


def test_log_with_deleted_input_files_is_unchanged(checkpoint: Path) -> None:
    """Spark must fail for these files rather than skip them."""
    before = notes(checkpoint)
    (checkpoint.parent / "read me" / "4.json").unlink()
    forget_later_files(checkpoint, 3)
    assert notes(checkpoint) == before
    forget_later_files(checkpoint, 4)
    assert notes(checkpoint) == {"4.compact": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        ('{"topic":{"0":7}}', 'v1\n{"topic":{"0":7}}'),
        ('{"logOffset":0}', 'v1\n{"path":"s3://bucket/1.json","timestamp":1,"batchId":1}'),
        ('{"logOffset":0}', 'v2\n{"path":"file:///1.json","timestamp":1,"batchId":1}'),
        ('{"logOffset":0}', 'v1\n{"path":"file:///1.json","timestamp":1,"batchId":"1"}'),
        ('{"logOffset":0}', 'v1\n{"path":["file:///"],"timestamp":1,"batchId":1}'),
        ('{"logOffset":0}', 'v1\n{"path":"file://[","timestamp":1,"batchId":1}'),
        ('{"logOffset":0}', f'v1\n{{"path":"file:///{"x" * 300}","timestamp":1,"batchId":1}}'),
    ],
)
def test_logs_of_other_sources_are_unchanged(tmp_path: Path, offset: str, text: str) -> None:
    """The log is of another kind of source, of remote files, or of another version of Spark."""
    for name, content in (("offsets/0", f"v1\n{{}}\n{offset}"), ("sources/0/0", text)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    for batch in (-1, 0):
        forget_later_files(tmp_path, batch)
        assert (tmp_path / "sources" / "0" / "0").read_text() == text
