"""The log of Spark's file source is taken back in a fork, so that the files which came later are read in batches again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millpond.executor.replay.spark_checkpoint import forget_later_files


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """After batches 0 to 5, each with one file, as Spark lays it out; 2 and 5 are compactions."""
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
    """The files of the log, with the batches that they tell of."""
    return {
        path.name: [json.loads(line)["batchId"] for line in path.read_text().splitlines()[1:]]
        for path in (checkpoint / "sources" / "0").iterdir()
        if not path.name.startswith(".")
    }


@pytest.mark.parametrize("batch", [0, 1, 2, 4])
def test_only_later_files_are_forgotten(checkpoint: Path, batch: int) -> None:
    """What stays is one file of the log, also where Spark has removed those that a compaction holds."""
    for removed in ("0", "1"):
        (checkpoint / "sources" / "0" / removed).unlink()
    forget_later_files(checkpoint, batch)

    assert notes(checkpoint) == {f"{batch}.compact": list(range(batch + 1))}
    assert not list((checkpoint / "sources" / "0").glob(".*"))


def test_a_query_that_had_not_begun_forgets_all(checkpoint: Path) -> None:
    """Nothing is left of its log."""
    forget_later_files(checkpoint, -1)
    assert notes(checkpoint) == {}


def test_files_that_are_gone_are_not_forgotten(checkpoint: Path) -> None:
    """Spark is to fail over them, rather than go on without them."""
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
    ],
)
def test_other_sources_are_left_alone(tmp_path: Path, offset: str, text: str) -> None:
    """Those of other kinds, folders elsewhere, and a log of another version of Spark."""
    for name, content in (("offsets/0", f"v1\n{{}}\n{offset}"), ("sources/0/0", text)):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(content)
    for batch in (-1, 0):
        forget_later_files(tmp_path, batch)
        assert (tmp_path / "sources" / "0" / "0").read_text() == text
