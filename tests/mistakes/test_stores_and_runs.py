"""Mistakes with stores: their location, their writers, and their consumed input."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import millpond as mp
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.table import FORMAT_VERSION_KEY, STORE_ID_KEY, create_table
from millpond.statestore.objects.local import LocalObjects
from millpond.statestore.objects.system_files import SystemFiles
from millpond.statestore.rows.row import ROW_SCHEMA
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import TableVersion
from tests.mistakes.catalogue import Told
from tests.mistakes.code_of_users import ROWS, counting, held_in_memory, run


@pytest.fixture
def pond(tmp_path: Path) -> Path:
    """A store with a finished run of ``counting``."""
    path = tmp_path / "pond"
    with mp.Store.open(path, leases=held_in_memory()) as store:
        run(counting(), ROWS, store, finish=False)
    return path


@pytest.mark.mistake("store-missing")
def test_missing_store(told: Told, tmp_path: Path) -> None:
    with told.by_error(tmp_path / "ponds"):
        mp.Store.open(tmp_path / "ponds", read_only=True)


@pytest.mark.mistake("store-in-a-used-folder")
def test_folder_with_other_contents(told: Told, tmp_path: Path) -> None:
    (tmp_path / "data.csv").touch()

    with told.by_error(tmp_path):
        mp.LocalRunner(tmp_path).run(counting(), {"queries": ROWS})


@pytest.mark.mistake("store-a-file")
def test_path_of_a_file(told: Told, tmp_path: Path) -> None:
    (tmp_path / "pond").touch()

    with told.by_error(tmp_path / "pond"):
        mp.Store.open(tmp_path / "pond")


@pytest.mark.mistake("store-without-put-if-absent")
@pytest.mark.parametrize("path", ["hdfs://namenode:8020/pond", "http://host/pond"])
def test_store_on_a_path_without_put_if_absent(told: Told, path: str) -> None:
    """Two writers could both create the same version."""
    with told.by_error(path):
        mp.Store.open(path, "127.0.0.1:1")


@pytest.mark.mistake("store-of-spark-path")
@pytest.mark.parametrize("path", ["dbfs:/mnt/pond", "s3:/bucket/pond"])
def test_url_with_one_slash(told: Told, path: str) -> None:
    """Python's paths would read it as a folder below the current one."""
    with told.by_error(path):
        mp.Store.open(path)


@pytest.mark.mistake("store-in-a-bucket-without-zookeeper")
def test_bucket_without_an_ensemble(told: Told) -> None:
    """The server beside a store serves one machine only."""
    with told.by_error("s3://bucket/pond"):
        mp.Store.open("s3://bucket/pond")


class Refusing(SystemFiles):
    """A file system that creates neither file nor folder, for a given reason.

    Tests may run as root, who may write everywhere, and with room on the disk.
    """

    def __init__(self, root: Path, number: int, *, is_refusing: bool = True) -> None:
        super().__init__(str(root))
        self.number = number
        self.is_refusing = is_refusing

    def make_folder(self, path: str) -> None:
        self._refuse(path)
        super().make_folder(path)

    def create(self, path: str, pieces: Iterable[bytes]) -> None:
        self._refuse(path)
        super().create(path, pieces)

    def _refuse(self, path: str) -> None:
        if self.is_refusing:
            raise OSError(self.number, os.strerror(self.number), path)


@pytest.mark.mistake("store-not-writable")
def test_read_only_folder(told: Told, tmp_path: Path) -> None:
    with told.by_error(tmp_path / "pond", "Permission denied"):
        LocalObjects(tmp_path / "pond", files=Refusing(tmp_path / "pond", errno.EACCES))


@pytest.mark.mistake("disk-full")
def test_full_disk(told: Told, tmp_path: Path) -> None:
    """`tests/fault/test_full_disk.py` fills a real disk."""
    files = Refusing(tmp_path / "rows", errno.ENOSPC, is_refusing=False)
    with mp.Store.in_memory(objects=LocalObjects(tmp_path / "rows", files=files)) as store:
        runner = mp.LocalRunner(store, progress=False, upkeep=None, pause_timeout="0s")
        running = runner.start(counting(), stepping=True)
        files.is_refusing = True
        with told.by_error(tmp_path, "No space left"):
            running.inject_durably("queries", ROWS)
        running.abandon()


@pytest.mark.mistake("zookeeper-unreachable")
def test_unreachable_ensemble(told: Told, pond: Path) -> None:
    """Readers need a given ensemble too."""
    with told.by_error("127.0.0.1:1"):
        mp.Store.open(pond, "127.0.0.1:1", read_only=True)


@pytest.mark.mistake("store-read-only")
def test_write_to_a_store_opened_for_reading(told: Told, pond: Path) -> None:
    with mp.Store.open(pond, read_only=True) as store, told.by_error(pond):
        run(counting(), ROWS, store)


@pytest.mark.mistake("store-copied")
def test_copied_store(told: Told, pond: Path, tmp_path: Path) -> None:
    """Two stores with one identity would write into the same sinks."""
    shutil.copytree(pond, tmp_path / "copy")

    with told.by_error(tmp_path / "copy", pond, "adopt"):
        mp.Store.open(tmp_path / "copy", leases=held_in_memory())


@pytest.mark.mistake("store-rolled-back")
def test_restored_backup(told: Told, pond: Path, tmp_path: Path) -> None:
    """Records acknowledged since the backup would be lost silently."""
    newest = Log(LocalObjects(pond / "rows")).latest_version()
    assert newest is not None
    (pond / "rows" / commit_path(TableVersion(newest))).unlink()

    with told.by_error(pond, f"committed=`{newest}`"):
        mp.Store.open(pond, read_only=True)


@pytest.mark.mistake("store-of-a-newer-millpond")
def test_store_of_a_newer_millpond(told: Told, tmp_path: Path) -> None:
    """The format's version is checked first."""
    objects = LocalObjects(tmp_path / "pond/rows")
    configuration = {FORMAT_VERSION_KEY: "2", STORE_ID_KEY: "s"}
    create_table(
        Log(objects), SystemClock(), SystemRng(), schema=ROW_SCHEMA, name="rows", configuration=configuration
    )

    with told.by_error("format_version=`2`"):
        mp.Store.open(tmp_path / "pond", read_only=True)


@pytest.mark.mistake("two-pipelines-on-one-store")
def test_two_pipelines_with_one_computation(told: Told) -> None:
    """A store may have several pipelines, but a computation belongs to one of them."""
    with mp.Store.in_memory() as store, told.by_error("counter", "flights", "searches"):
        run(counting(), ROWS, store, finish=False)
        run(counting(pipeline="flights"), ROWS, store, finish=False)


@pytest.fixture
def two_processes() -> Iterator[tuple[mp.Store, mp.Store]]:
    """One store opened by two processes."""
    registry = mp.testing.MemoryRegistry()
    with (
        mp.Store.in_memory(registry=registry) as store,
        mp.Store.in_memory(registry=registry, objects=store.objects) as other,
    ):
        yield store, other


@pytest.mark.mistake("store-in-use")
def test_pipeline_run_by_another_process(told: Told, two_processes: tuple[mp.Store, mp.Store]) -> None:
    store, other = two_processes
    running = mp.LocalRunner(store, progress=False).start(counting(), stepping=True)
    running.inject_durably("queries", ROWS)

    with told.by_error("searches", "holder="):
        run(counting(), ROWS, other, on_held="refuse")
    running.stop()


@pytest.mark.mistake("taken-over")
def test_run_whose_pipeline_was_taken_over(told: Told, two_processes: tuple[mp.Store, mp.Store]) -> None:
    """Its next commit is fenced."""
    store, other = two_processes
    running = mp.LocalRunner(store, progress=False).start(counting(), stepping=True)
    running.inject_durably("queries", ROWS)
    run(counting(), [], other, finish=False)

    with told.by_error("searches"):
        running.inject_durably("queries", ROWS)
    running.abandon()


@pytest.mark.mistake("run-twice")
def test_more_input_after_the_end(told: Told) -> None:
    """The first run has closed all windows."""
    with mp.Store.in_memory() as store, told.by_error("queries", "finish=False"):
        run(counting(), ROWS, store)
        run(counting(), [*ROWS, *ROWS], store)


@pytest.mark.mistake("input-shorter")
def test_changed_rows_of_a_bounded_input(told: Told) -> None:
    """A run skips consumed rows by their number, so it needs the same rows again."""
    with mp.Store.in_memory() as store, told.by_error("queries", "rows=`1`", "consumed=`2`"):
        run(counting(), ROWS, store, finish=False)
        run(counting(), ROWS[:1], store, finish=False)


@pytest.mark.mistake("input-changed")
def test_other_rows_of_a_bounded_input(told: Told) -> None:
    with mp.Store.in_memory() as store, told.by_error("queries", "first 1", "consumed=`1`"):
        run(counting(), ROWS[:1], store, finish=False)
        run(counting(), ROWS[1:], store, finish=False)


@pytest.mark.mistake("run-stopped")
def test_input_for_a_stopped_run(told: Told) -> None:
    """A stopped run has released its leases."""
    with mp.Store.in_memory() as store:
        running = mp.LocalRunner(store, progress=False).start(counting(), stepping=True)
        running.stop()
        with told.by_error("stopped"):
            running.inject("queries", ROWS)


@pytest.mark.mistake("savepoint-unknown")
def test_missing_savepoint(told: Told, pond: Path) -> None:
    with mp.Store.open(pond, leases=held_in_memory()) as store, told.by_error("releases", "'release'"):
        store.savepoint("release")
        store.drop_savepoint("releases")


@pytest.mark.mistake("version-unknown")
def test_future_version(told: Told, pond: Path) -> None:
    with mp.Store.open(pond, leases=held_in_memory()) as store, told.by_error("version=`900`", "newest="):
        store.savepoint("later", 900)


@pytest.mark.mistake("retention-negative")
def test_negative_retention(told: Told) -> None:
    with told.by_error("-1h"):
        mp.UpkeepPolicy(retention="-1h")


@pytest.mark.mistake("replay-of-another-input")
def test_replay_with_fewer_rows(told: Told, pond: Path, tmp_path: Path) -> None:
    with mp.Store.open(pond, read_only=True) as store, told.by_error("queries", "rows=`1`"):
        mp.replay(store, tmp_path / "again", counting(), {"queries": ROWS[:1]}, version=0)


@pytest.mark.mistake("replay-of-another-pipeline")
def test_replay_under_another_name(told: Told, pond: Path, tmp_path: Path) -> None:
    with mp.Store.open(pond, read_only=True) as store, told.by_error("flights", "searches"):
        mp.replay(store, tmp_path / "again", counting(pipeline="flights"), {"queries": ROWS}, version=0)


@pytest.mark.mistake("fork-into-a-store")
def test_fork_onto_an_existing_store(told: Told, pond: Path) -> None:
    with mp.Store.open(pond, read_only=True) as store, told.by_error(pond):
        mp.fork_store(store, pond, version=1)


@pytest.mark.mistake("dead-letter-unknown")
def test_missing_dead_letter(told: Told) -> None:
    """Only failed records can be retried."""
    with mp.Store.in_memory() as store:
        run(counting(), ROWS, store, finish=False)
        with told.by_error("counter"):
            mp.drop_dead_letters(store, computation="counter")


@pytest.mark.mistake("rows-of-a-misspelt-name")
def test_rows_of_a_misspelt_computation(told: Told) -> None:
    with mp.Store.in_memory() as store:
        run(counting(), ROWS, store)
        assert store.rows_view("something_else").to_arrow().num_rows == 0
        with told.by_error("countr", "'counter'"):
            store.rows_view("countr")
        with pytest.raises(mp.InvalidError, match="must be a list of keys"):
            store.rows_view("counter").to_arrow(keys="cat")


@pytest.mark.mistake("runner-intervals-changed")
def test_runner_with_another_number_of_intervals(told: Told) -> None:
    with mp.Store.in_memory() as store:
        mp.LocalRunner(store, progress=False, intervals=2).run(counting(), {"queries": ROWS}, finish=False)
        mp.LocalRunner(store, progress=False).run(counting(), {"queries": ROWS}, finish=False)
        with told.by_error("counter", "intervals=`4`"):
            mp.LocalRunner(store, progress=False, intervals=4).run(
                counting(), {"queries": ROWS}, finish=False
            )


@pytest.mark.mistake("bound-not-a-number")
def test_bound_that_no_comparison_refuses(told: Told) -> None:
    with told.by_error("fan_in", "nan"):
        mp.CompactionPolicy(fan_in=float("nan"))  # type: ignore[arg-type]


@pytest.mark.mistake("policy-of-another-kind")
def test_policy_that_is_a_flag(told: Told) -> None:
    with mp.Store.in_memory() as store, told.by_error("balance", "bool"):
        mp.LocalRunner(store, balance=True)  # type: ignore[arg-type]


@pytest.mark.mistake("open-flag-in-words")
def test_store_is_not_created_by_a_word(told: Told, tmp_path: Path) -> None:
    with told.by_error("create", "no"):
        mp.Store.open(tmp_path / "pond", create="no")  # type: ignore[arg-type]
    assert not (tmp_path / "pond").exists()


@pytest.mark.mistake("version-negative")
def test_version_counted_from_the_end(told: Told) -> None:
    """Version -1 was an empty store."""
    with mp.Store.in_memory() as store, told.by_error("version", "-1"):
        store.rows_view("counter", -1)
