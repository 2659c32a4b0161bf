"""Spark's checkpoints, rewound with a repaired store."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.executor.replay.fork import fork_store
from millpond.executor.replay.spark_checkpoint import Reached, reached_batches, rewind_checkpoints
from millpond.statestore.errors import DataError
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.obstore import ObstoreObjects
from millpond.statestore.store import Store
from millpond.testing.fixtures.determinism import ManualClock
from millpond.testing.servers.s3_server import S3Server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lay out two queries' checkpoints after batches 0 to 10, as Spark does."""
    for query in ("a", "b"):
        for part in ("commits", "offsets"):
            (tmp_path / query / part).mkdir(parents=True)
            for batch in range(11):
                (tmp_path / query / part / str(batch)).write_text("v1")
                (tmp_path / query / part / f".{batch}.crc").write_text("x")
        (tmp_path / query / "metadata").write_text(f'{{"id":"{query}"}}')
    (tmp_path / "a" / "state" / "metadata").mkdir(parents=True)
    return tmp_path


def batches(folder: Path, query: str, part: str) -> list[int]:
    return sorted(int(path.name) for path in (folder / query / part).iterdir() if path.name.isdecimal())


def test_rewind_removes_later_batches_of_the_named_query(folder):
    """The query resumes after the last remaining batch."""
    assert rewind_checkpoints(folder, {"a": 8, "missing": 3}) == ("a",)
    assert batches(folder, "a", "commits") == batches(folder, "a", "offsets") == list(range(9))
    assert batches(folder, "b", "commits") == list(range(11))
    assert not (folder / "a" / "offsets" / ".9.crc").exists()
    assert rewind_checkpoints(folder, {"a": 8}) == ()


def test_rewind_to_the_start_removes_all_batches(folder):
    """A dry run changes nothing."""
    assert rewind_checkpoints(folder, {"b": -1}, dry_run=True) == ("b",)
    assert batches(folder, "b", "offsets") == list(range(11))
    rewind_checkpoints(folder, {"b": -1})
    assert batches(folder, "b", "offsets") == []


@pytest.mark.parametrize("metadata", ["not JSON", "[]", "{}", '{"id":["a"]}'])
def test_missing_or_unreadable_folder_has_no_checkpoints(tmp_path, metadata):
    (tmp_path / "metadata").write_text(metadata)
    assert rewind_checkpoints(tmp_path, {"a": 1}) == rewind_checkpoints(tmp_path / "no", {"a": 1}) == ()


def test_removed_entries_are_restored_from_the_store(folder):
    """Spark keeps only the last hundred batches."""
    for part in ("commits", "offsets"):
        for batch in range(6):
            (folder / "a" / part / str(batch)).unlink()
    entry = 'v1\n{"batchWatermarkMs":0}\n{"logOffset":3}'

    assert rewind_checkpoints(folder, {"a": 3}, offsets={"a": entry}) == ("a",)
    assert batches(folder, "a", "commits") == batches(folder, "a", "offsets") == [3]
    assert (folder / "a" / "offsets" / "3").read_text() == entry
    assert not (folder / "a" / "offsets" / ".3.crc").exists()
    assert (folder / "b" / "offsets" / "3").read_text() == "v1"


LINKS = ("q", "a/offsets", "a/commits", "a/offsets/3", "a/metadata", "a/sources", "a/commits/.4.crc")


@pytest.mark.parametrize("place", LINKS)
@pytest.mark.parametrize("is_dangling", [True, False])
def test_checkpoint_with_a_link_is_damage_and_leads_nowhere(folder, place, is_dangling):
    """Entries of the log would be written, and numbered files removed, wherever the link points."""
    outside = folder / "outside"
    if not is_dangling:
        outside.mkdir()
        (outside / "9").write_text("a file of the user")
    link = folder / "in" / place
    (folder / "a").rename(folder / "aside")
    (folder / "in").mkdir()
    (folder / "aside").rename(folder / "in" / "a")
    if link.exists():
        link.rename(folder / "moved")
    link.symlink_to(outside)

    for use in (reached_batches, lambda path: rewind_checkpoints(path, {"a": 3}, offsets={"a": "evil"})):
        with pytest.raises(DataError, match="must not be links"):
            use(folder / "in")
    assert outside.exists() != is_dangling
    assert is_dangling or [path.read_text() for path in outside.iterdir()] == ["a file of the user"]


@pytest.mark.parametrize("place", ["checkpoints", *(f"checkpoints/{link}" for link in LINKS)])
def test_fork_copies_nothing_through_a_link(folder, tmp_path_factory, place):
    base = tmp_path_factory.mktemp("stores")
    (base / "outside").mkdir()
    (base / "outside" / "secret").write_text("a file of the user")
    pond = base / "pond"
    with Store.open(pond, leases=_leases):
        pass
    folder.rename(pond / "checkpoints")
    link = pond / place
    if link.exists():
        link.rename(base / "moved")
    link.symlink_to(base / "outside")

    with Store.open(pond, read_only=True) as store, pytest.raises(DataError, match="must not be links"):
        fork_store(store, base / "fork")
    assert not (base / "fork").exists()
    assert not any(
        path.read_bytes() == b"a file of the user" for path in base.rglob("fork*/**/*") if path.is_file()
    )


def _leases(incarnation: str, writer_id: str) -> MemoryLeases:
    return MemoryLeases(MemoryRegistry(), ManualClock(), writer_id=writer_id)


def test_checkpoints_in_an_object_store_are_rewound_like_local_ones(
    s3_bucket: str, s3_server: S3Server
) -> None:
    """Spark leaves markers of folders and temporary files there, but no checksums."""
    place, options = f"{s3_bucket}/pond/checkpoints", s3_server.options
    objects = ObstoreObjects(place, options)
    assert reached_batches(place, options) == {}
    for path in (
        "a/metadata",
        *(f"a/{part}/{batch}" for part in ("commits", "offsets") for batch in range(4)),
    ):
        objects.put(path, b'{"id":"a"}')
    objects.put("a/offsets/.4.0b1e.tmp", b"")
    assert reached_batches(place, options) == {"a": Reached(done=3, planned=3)}

    assert rewind_checkpoints(place, {"a": 1}, storage_options=options) == ("a",)
    assert reached_batches(place, options) == {"a": Reached(done=1, planned=1)}
    assert rewind_checkpoints(place, {"a": 2}, offsets={"a": "entry"}, storage_options=options) == ()
    assert objects.get("a/offsets/2") == b"entry"
