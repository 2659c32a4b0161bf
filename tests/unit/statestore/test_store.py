"""The store: creation, opening and refusals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.computation.context import Context
from millpond.executor.computation.records import Record
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.statestore import store as stores
from millpond.statestore.errors import DataError, FencedError, InvalidError, UnavailableError
from millpond.statestore.interval import Interval
from millpond.statestore.leases.ensemble import NO_ENSEMBLE, Ensemble
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.leases.zookeeper_lease import ZooKeeperLeases
from millpond.statestore.leases.zookeeper_service import LeaseFactory
from millpond.statestore.log.log import Log, commit_path
from millpond.statestore.log.table import FORMAT_VERSION_KEY, STORE_ID_KEY, create_table
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.rows.row import Fence
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.fixtures.commit_requests import fence_request, superstep_request
from tests.tidy import ROOT

CLOCK = SystemClock()
INTERVAL = Interval("c")
_CREATE = """
import sys
from pathlib import Path
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock

folder, number = Path(sys.argv[1]), sys.argv[2]
(folder / f"ready{number}").touch()
while not (folder / "go").exists():
    SystemClock().sleep_ms(1)
with Store.open(folder / "pond") as store:
    print(store.store_id, store.leases is not None)
"""


def leases_of(registry: MemoryRegistry) -> LeaseFactory:
    return lambda _, writer_id: MemoryLeases(registry, CLOCK, writer_id=writer_id)


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Store]:
    registry = MemoryRegistry()
    return lambda **options: Store.open(tmp_path / "pond", leases=leases_of(registry), **options)


def table_at(folder: Path, configuration: dict[str, str]) -> None:
    schema = pa.schema([pa.field("key", pa.string())])
    log = Log(open_objects(str(folder / "rows")))
    create_table(log, CLOCK, SystemRng(), schema=schema, name="rows", configuration=configuration)


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class Count(Computation):
    def process_record(self, context: Context, record: Record) -> None:
        context.state.set(context.state.get(0) + 1)


def counting() -> EnginePipeline:
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Count(), name="count")
    return pipeline


def test_store_is_created_and_reopened(opened: Callable[..., Store], tmp_path: Path) -> None:
    """The path may be text, a path or a file URL."""
    with opened() as made:
        first = made.store_id
    with opened(create=False) as again:
        assert again.store_id == first
    with Store.open(f"file://{tmp_path}/pond", read_only=True) as by_url:
        assert by_url.store_id == first
        assert by_url.path == str(tmp_path / "pond")


def test_store_may_be_opened_twice(opened: Callable[..., Store]) -> None:
    """Only intervals have one owner."""
    with opened() as one, opened() as other:
        assert one.store_id == other.store_id
        assert one.committer.writer_id != other.committer.writer_id


def test_concurrent_creators_share_store_and_zookeeper(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _CREATE, str(tmp_path), str(number)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    while not {"ready0", "ready1"} <= entries(tmp_path):
        CLOCK.sleep_ms(5)
    (tmp_path / "go").touch()
    said = [process.communicate(timeout=60) for process in processes]

    assert [error for _, error in said if error] == []
    assert said[0][0] == said[1][0]
    assert said[0][0].endswith("True\n")
    with Store.open(tmp_path / "pond", read_only=True) as store:
        assert store.snapshot().version == 0


def test_path_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pond"
    path.write_text("letters")

    with pytest.raises(
        InvalidError, match=r"must be a folder, but it is a file: name another place path=`.*pond`"
    ):
        Store.open(path)
    assert path.read_text() == "letters"


def test_path_below_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("letters")

    with pytest.raises(InvalidError, match="there is a file on the way to it"):
        Store.open(tmp_path / "file" / "pond")


@pytest.mark.parametrize("strange", ["notes.txt", "rows/notes.txt"])
def test_folder_of_something_else_is_refused(tmp_path: Path, strange: str) -> None:
    file = tmp_path / "pond" / strange
    file.parent.mkdir(parents=True)
    file.write_text("letters")

    with pytest.raises(InvalidError, match="not empty and is not a Millpond store"):
        Store.open(tmp_path / "pond")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]


@pytest.mark.parametrize("half", ["", "rows", "rows/_delta_log"])
def test_half_made_store_is_completed(tmp_path: Path, opened: Callable[..., Store], half: str) -> None:
    """Its creator was killed."""
    (tmp_path / "pond" / half).mkdir(parents=True)
    with opened() as store:
        assert store.snapshot().version == 0


def test_staging_file_of_first_commit_is_ignored(tmp_path: Path, opened: Callable[..., Store]) -> None:
    log = tmp_path / "pond" / "rows" / "_delta_log"
    log.mkdir(parents=True)
    (log / "00000000000000000000.json#1").write_text('{"protocol":')
    with opened() as store:
        assert store.snapshot().version == 0


def test_absent_store_is_not_created_for_reading(tmp_path: Path) -> None:
    for options in ({"read_only": True}, {"create": False}):
        with pytest.raises(InvalidError, match="there is no store at this path"):
            Store.open(tmp_path / "pond", **options)
    assert entries(tmp_path) == set()


def test_half_made_store_is_not_read(tmp_path: Path) -> None:
    """A reader must not complete it."""
    (tmp_path / "pond" / "rows" / "_delta_log").mkdir(parents=True)

    with pytest.raises(InvalidError, match="there is no store at this path"):
        Store.open(tmp_path / "pond", read_only=True)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    table_at(tmp_path / "pond", {FORMAT_VERSION_KEY: "2", STORE_ID_KEY: "s"})
    before = entries(tmp_path / "pond")

    for read_only in (False, True):
        with pytest.raises(InvalidError, match=r"newer Millpond.*format_version=`2` known=`1`"):
            Store.open(tmp_path / "pond", read_only=read_only)
    assert entries(tmp_path / "pond") == before


@pytest.mark.parametrize("configuration", [{}, {FORMAT_VERSION_KEY: "1"}, {FORMAT_VERSION_KEY: "one"}])
def test_foreign_delta_table_is_refused(tmp_path: Path, configuration: dict[str, str]) -> None:
    table_at(tmp_path / "pond", configuration)

    with pytest.raises(InvalidError, match="not a Millpond store"):
        Store.open(tmp_path / "pond", read_only=True)


def test_reader_needs_no_zookeeper(tmp_path: Path, opened: Callable[..., Store]) -> None:
    opened().close()
    with Store.open(tmp_path / "pond", read_only=True) as store:
        assert store.rows_view("c").to_arrow().num_rows == 0
        for part in ("committer", "leases"):
            with pytest.raises(InvalidError, match="opened read-only"):
                getattr(store, part)
    assert "zookeeper" not in entries(tmp_path / "pond")


def test_reader_refuses_rolled_back_store(tmp_path: Path, zookeeper_hosts: str) -> None:
    """The mark comes from the given ZooKeeper, otherwise from the folder."""
    with Store.open(tmp_path / "pond", zookeeper=zookeeper_hosts) as store:
        for number in range(3):
            store.committer.commit(fence_request(number + 1, INTERVAL))
        store.leases.high_water.flush()
    asked = {"zookeeper": zookeeper_hosts, "read_only": True}
    with Store.open(tmp_path / "pond", **asked) as whole:
        assert whole.snapshot().version == 3
    newest = tmp_path / "pond" / "rows" / commit_path(TableVersion(3))
    newest.unlink()

    for named in (asked, {"read_only": True}):
        with pytest.raises(DataError, match="its log was cut or rolled back"):
            Store.open(tmp_path / "pond", **named)
    with Store.open(tmp_path / "pond", **asked, check_mark=False) as store:
        assert store.snapshot().version == 2
    checked = CliRunner().invoke(main, ["verify", str(tmp_path / "pond"), "--zookeeper", zookeeper_hosts])
    assert (checked.exit_code, newest.name in checked.output) == (1, True)


def test_reader_asks_running_server_of_store(
    tmp_path: Path, zookeeper_hosts: str, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a given server must answer."""
    opened().close()
    monkeypatch.setattr(stores, "local_server", lambda _: zookeeper_hosts)
    with Store.open(tmp_path / "pond", read_only=True) as store:
        leases = ZooKeeperLeases(zookeeper_hosts, store.store_id, "writer", CLOCK)
        leases.high_water.advance(TableVersion(9), "digest")
        leases.close()
    with pytest.raises(DataError, match="its log was cut or rolled back"):
        Store.open(tmp_path / "pond", read_only=True)

    def away(*_: object) -> None:
        raise UnavailableError("zookeeper does not answer")

    monkeypatch.setattr(stores, "ask_for_mark", away)
    Store.open(tmp_path / "pond", read_only=True).close()
    with pytest.raises(UnavailableError):
        Store.open(tmp_path / "pond", read_only=True, zookeeper="127.0.0.1:1")


def test_stored_mark_shows_missing_commits_without_zookeeper(
    tmp_path: Path, opened: Callable[..., Store]
) -> None:
    with opened() as store:
        store.committer.commit(fence_request(1, INTERVAL))
        backup = shutil.copytree(tmp_path / "pond" / "rows", tmp_path / "backup")
        store.committer.commit(fence_request(2, INTERVAL))
    Store.open(tmp_path / "pond", read_only=True).close()
    (tmp_path / "pond" / "rows" / commit_path(TableVersion(2))).unlink()
    said = "its log was cut or rolled back.*newest=`1` committed=`2`"
    with pytest.raises(DataError, match=said):
        Store.open(tmp_path / "pond", read_only=True)

    shutil.rmtree(tmp_path / "pond" / "rows")
    shutil.copytree(backup, tmp_path / "pond" / "rows")
    with pytest.raises(DataError, match=said):
        Store.open(tmp_path / "pond", read_only=True)
    with pytest.raises(DataError, match=said):
        opened()
    checked = CliRunner().invoke(main, ["verify", str(tmp_path / "pond")])
    assert (checked.exit_code, f"{TableVersion(2):020d}.json" in checked.output) == (1, True)


def test_mark_behind_log_is_no_error(tmp_path: Path, opened: Callable[..., Store]) -> None:
    """A crash may come between commit and mark."""
    with opened() as store:
        store.committer.commit(fence_request(1, INTERVAL))
    marks = tmp_path / "pond" / "high_water"
    before = entries(marks)
    with opened() as store:
        store.committer.commit(fence_request(2, INTERVAL))
    for mark in marks.iterdir():
        if mark.name not in before:
            mark.unlink()

    Store.open(tmp_path / "pond", read_only=True).close()
    opened().close()
    assert any(name.startswith(f"{2:020d}-") for name in entries(marks))


def test_old_marks_are_deleted(tmp_path: Path, opened: Callable[..., Store]) -> None:
    for number in range(6):
        with opened() as store:
            for fence in range(3):
                store.committer.commit(fence_request(3 * number + fence + 1, INTERVAL))
                store.keep_mark()
    assert len(entries(tmp_path / "pond" / "high_water")) <= 3


def test_object_store_needs_ensemble() -> None:
    with pytest.raises(InvalidError, match="pass zookeeper='host:port"):
        Store.open("s3://bucket/pond")


def test_unreachable_zookeeper_opens_nothing(tmp_path: Path) -> None:
    def away(store_id: str, writer_id: str) -> MemoryLeases:
        raise UnavailableError("zookeeper does not answer", store=store_id)

    with pytest.raises(UnavailableError):
        Store.open(tmp_path / "pond", leases=away)
    with Store.open(tmp_path / "pond", leases=leases_of(MemoryRegistry())) as store:
        assert store.snapshot().version == 0


def test_stores_in_memory_share_disk_and_registry() -> None:
    """The second store fences the first."""
    disk, registry = MemoryObjects(), MemoryRegistry()
    first = Store.in_memory(objects=disk, registry=registry, clock=ManualClock(), rng=SeededRng(1))
    second = Store.in_memory(objects=disk, registry=registry, clock=ManualClock(), rng=SeededRng(2))
    assert first.store_id == second.store_id
    assert first.path == disk.url
    for store in (first, second):
        lease = store.leases.take(INTERVAL, above=Sequencer(0))
        store.committer.commit(fence_request(lease.sequencer, INTERVAL))

    with pytest.raises(FencedError):
        first.committer.commit(superstep_request(1, 1, INTERVAL))
    assert second.snapshot().fence_of(INTERVAL) == Fence(Sequencer(2), CommitNumber(0))
    assert second.catalog is None


def test_stores_in_memory_are_otherwise_separate() -> None:
    assert Store.in_memory().store_id != Store.in_memory().store_id


def test_lost_catalog_is_rebuilt_from_log(tmp_path: Path, opened: Callable[..., Store]) -> None:
    def code_versions(store: Store) -> list[tuple[object, ...]]:
        assert store.catalog is not None
        return [
            (entry.name, entry.pipeline, entry.code_version, entry.code_hash, entry.options)
            for entry in store.catalog.computations()
        ]

    rows = [{"k": key, "t": at} for at, key in enumerate("abcab")]
    with opened() as store:
        LocalRunner(store, progress=False).run(counting(), {"in": rows})
    with opened() as store:
        # An owner that took over and has done nothing yet is known too.
        with LocalRunner(store, progress=False).start(counting()):
            pass
        kept = code_versions(store)
    for file in (tmp_path / "pond").glob("catalog.sqlite*"):
        file.unlink()
    with opened() as store:
        made_again = code_versions(store)

    assert made_again == kept
    assert [entry[:3] for entry in kept] == [("count", "p", 1)]


def test_damaged_catalog_stops_no_pipeline(tmp_path: Path, opened: Callable[..., Store]) -> None:
    """Only access to the catalog raises."""
    rows = [{"k": "a", "t": 1}]
    opened().close()
    (tmp_path / "pond" / "catalog.sqlite").write_bytes(b"no database" * 1_000)
    with opened() as store:
        LocalRunner(store, progress=False).run(counting(), {"in": rows})
        assert store.rows_view("count").to_arrow().column("state").to_pylist() == ["1"]
        with pytest.raises(DataError, match="rebuilt from the log"):
            store.catalog  # noqa: B018 - asking is the act


def test_another_stores_catalog_is_refused(tmp_path: Path, opened: Callable[..., Store]) -> None:
    with opened(catalog=f"sqlite:///{tmp_path}/shared.sqlite") as store:
        assert store.catalog is not None
    with (
        Store.open(
            tmp_path / "other",
            catalog=f"sqlite:///{tmp_path}/shared.sqlite",
            leases=leases_of(MemoryRegistry()),
        ) as other,
        pytest.raises(InvalidError, match="belongs to another store"),
    ):
        other.catalog  # noqa: B018 - asking is the act


def test_older_versions_stay_readable(opened: Callable[..., Store]) -> None:
    with opened() as store:
        run = LocalRunner(store, progress=False).start(counting(), stepping=True)
        versions = []
        for at in range(3):
            run.inject("in", [{"k": "a", "t": at}])
            run.run_until_quiet()
            versions.append(store.snapshot().version)
        run.stop()

        for count, version in enumerate(versions, start=1):
            assert store.rows_view("count", version).to_arrow().column("state").to_pylist() == [str(count)]
            assert store.sql(version).sql("select state from count").fetchall() == [(str(count),)]


def served_by(registry: MemoryRegistry, ensemble: Ensemble) -> LeaseFactory:
    class Served(MemoryLeases):
        @property
        def ensemble(self) -> Ensemble:
            return ensemble

    return lambda _, writer_id: Served(registry, CLOCK, writer_id=writer_id)


def test_take_over_with_another_ensemble_is_refused(tmp_path: Path) -> None:
    """Also by a process that opened the store before the log named one; its commit would fence the owner."""
    pipeline = EnginePipeline("p")
    pipeline.inject("in", key="k", at="t").apply(Computation(), name="c")
    first, other = Ensemble("a1", "zk1:2181"), Ensemble("b2", "zk2:2181")
    with (
        Store.open(tmp_path / "pond", leases=served_by(MemoryRegistry(), first)) as store,
        Store.open(tmp_path / "pond", leases=served_by(MemoryRegistry(), other)) as late,
        LocalRunner(store, progress=False).start(pipeline, stepping=True) as run,
    ):
        takings = [lambda: LocalRunner(late, progress=False).start(pipeline)]
        takings += [
            partial(Store.open, tmp_path / "pond", leases=served_by(MemoryRegistry(), one))
            for one in (other, NO_ENSEMBLE)
        ]
        for taking in takings:
            with pytest.raises(InvalidError, match="pass zookeeper='zk1:2181'"):
                taking()
        run.inject("in", {"k": "a", "t": 1})
        run.run_until_quiet()
