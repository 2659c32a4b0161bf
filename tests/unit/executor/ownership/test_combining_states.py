"""States to which code only adds: what they refuse, that they read nothing, and what becomes of rows of other code."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millpond.executor.computation.computation import Computation
from millpond.executor.computation.state import CombiningState
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.offline_upgrade import upgrade_offline
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.replay.fork import fork_store
from millpond.gc.compaction import Compaction, CompactionPolicy, compact_files
from millpond.statestore.errors import DataError, InvalidError
from millpond.statestore.history.verification import verify_store
from millpond.statestore.interval import Interval
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.rows import files as row_files
from millpond.statestore.rows import row_format
from millpond.statestore.rows.files import read_row_files
from millpond.statestore.rows.merge import merge_updates
from millpond.statestore.rows.row import Fence
from millpond.statestore.rows.state_schema import AddendCodec, addend_columns_among
from millpond.statestore.store import Store
from millpond.statestore.types import CommitNumber, Sequencer
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from tests.unit.executor.ownership.test_typed_states import ALL, Pond, column_of, comparable, inject, rewind

SUMS = pa.schema([("n", pa.int64()), ("total", pa.int64())])
STATE = CombiningState(SUMS)
_TOKENS = count(1)
KEEP_ALL = UpkeepPolicy(compaction=CompactionPolicy(files_max=10_000, fan_in=10_000))


class Adding(Computation):
    def process_record(self, context, record):
        context.state.add({"n": 1, "total": record.value.get("v", 10)})


class Setting(Computation):
    """The same sums by code that reads its state."""

    def process_record(self, context, record):
        state = context.state.get({"n": 0, "total": 0})
        context.state.set({"n": state["n"] + 1, "total": state["total"] + record.value.get("v", 10)})


def totals(pond: Pond, name: str = "c") -> dict[str, tuple[Any, Any]]:
    return {key: (state["n"], state["total"]) for key, state in pond.states(name).items()}


# ------------------------------------------------------------- what it spares


class CountingObjects(MemoryObjects):
    """Counts the reads of row files."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def get(self, path: str) -> bytes:
        self.reads += path.endswith(".parquet") and "computation=c" in path
        return super().get(path)


@pytest.mark.parametrize("cache_mib", [0, 64])
def test_no_row_is_read_and_none_is_kept(cache_mib: int):
    pond = Pond(cache_mib=cache_mib, upkeep=KEEP_ALL)
    pond.objects = CountingObjects()
    for _ in range(3):
        with pond.start(pond.pipeline(Adding(), state=STATE, exactly_once=False)) as run:
            inject(run, *"abcab")
    assert pond.objects.reads == 0
    assert totals(pond) == {"a": (6, 60), "b": (6, 60), "c": (3, 30)}
    assert pond.objects.reads > 0


def test_repeated_ids_are_found_without_the_rows():
    pond = Pond(upkeep=KEEP_ALL)
    rows = [{"k": key, "id": f"id {number}"} for number, key in enumerate("abcab")]
    for _ in range(3):
        pond.run(Adding(), rows=rows, state=STATE)
    assert totals(pond) == {"a": (2, 20), "b": (2, 20), "c": (1, 10)}


def test_explain_tells_that_no_state_is_read():
    assert "once a record; its state is added to, not read" in Pond.pipeline(Adding(), state=STATE).explain()


# ------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context.state.get(),
        lambda context: context.state.set({"n": 1}),
        lambda context: context.state.delete(),
        lambda context: context.state.hold(1),
        lambda context: context.state.open(lambda stored: stored),
        lambda context: context.set_timer(1),
    ],
)
def test_any_other_use_of_the_state_ends_the_run(use: Any):
    class Wrong(Computation):
        def process_record(self, context, record):
            try:
                use(context)
            except InvalidError:
                context.state.add({"n": 1})

    with pytest.raises(InvalidError, match=r"combining state.*computation=.c."):
        Pond().run(Wrong(), "a", state=STATE)


@pytest.mark.parametrize(
    "use",
    [
        lambda groups: groups.states,
        lambda groups: groups.state("n"),
        lambda groups: groups.set_states({"n": [1]}),
    ],
)
def test_any_other_use_by_a_table_ends_the_run(use: Any):
    class Wrong(Computation):
        def process_table(self, context, table, groups):
            use(groups)

    with pytest.raises(InvalidError, match=r"combining state.*computation=.c."):
        Pond().run(Wrong(), "a", state=STATE)


@pytest.mark.parametrize("options", [{}, {"state": SUMS}])
def test_only_a_combining_state_can_be_added_to(options: dict[str, Any]):
    with pytest.raises(InvalidError, match=r"only a combining state can be added to.*computation=.c."):
        Pond().run(Adding(), "a", **options)


class WithTimers(Adding):
    def process_timer(self, context, timer):
        pass


class WithVersion(Adding):
    state_version = 1

    def upgrade_state(self, state, version):
        return state


@pytest.mark.parametrize(
    ("computation", "options", "message"),
    [
        (WithTimers(), {}, "has no timers"),
        (Adding(), {"time_sorted": True}, "no time_sorted"),
        (WithVersion(), {}, "has no versions"),
        (Adding(), {"state": CombiningState}, "give an instance"),
        (Adding(), {"state": CombiningState(pa.schema([("n", pa.float64())]))}, "sums of whole numbers"),
        (Adding(), {"state": CombiningState(pa.schema([pa.field("n", pa.int64(), False)]))}, "nullable"),
        (Adding(), {"state": CombiningState({"n": int})}, "must be an Arrow schema"),
    ],
)
def test_declarations_without_a_meaning_are_refused(
    computation: Computation, options: dict[str, Any], message: str
):
    with pytest.raises(InvalidError, match=message):
        Pond.pipeline(computation, **{"state": STATE, **options})


def test_values_that_do_not_fit_become_letters():
    pond = Pond()
    rows = [{"k": "a", "v": value} for value in (1, 2.5, "x", 2**63 - 1)]
    with pond.start(pond.pipeline(Adding(), state=STATE, retries=0)) as run:
        # In one bundle, where the last one does not fit any more, and in two, where each fits.
        run.inject("in", [{"t": number, "id": f"{number}", **row} for number, row in enumerate(rows)])
        run.run_until_quiet()
    assert totals(pond) == {"a": (1, 1)}
    assert len(pond.store().rows_view("dead_letters").to_arrow()) == 3

    pond.run(Adding(), rows=[{"k": "a", "v": 2**63 - 1}], state=STATE)
    with pytest.raises(DataError, match="does not fit into 64 bits"):
        totals(pond)


# ------------------------------------------------------------- rows of other code


def test_sums_of_code_that_read_its_state_go_on_as_a_combining_state():
    pond = Pond()
    pond.run(Setting(), "a", "b")
    pond.run(Setting(), "b", "c", state=SUMS)
    pond.run(Adding(), "a", "b", "b", state=STATE)
    assert totals(pond) == {"a": (2, 20), "b": (4, 40), "c": (1, 10)}
    assert pond.columns() == [column_of(SUMS)]


class Other(Computation):
    def process_record(self, context, record):
        context.state.set({"other": 1})


class Timed(Computation):
    def process_record(self, context, record):
        context.set_timer(1 << 50)

    def process_timer(self, context, timer):
        pass


@pytest.mark.parametrize(
    ("computation", "options"),
    [
        (Timed(), {}),
        (Other(), {"state": pa.schema([("other", pa.int64())])}),
        (WithVersion(), {"state": STATE.schema}),
    ],
)
def test_rows_that_are_no_sums_are_refused(computation: Computation, options: dict[str, Any]):
    pond = Pond()
    if isinstance(computation, WithVersion):
        computation.process_record = Setting().process_record
    pond.run(computation, "a", **options)
    with pytest.raises(InvalidError, match=r"cannot add to the computation's rows|newer code"):
        pond.run(Adding(), "b", state=STATE)


@pytest.mark.parametrize(
    ("computation", "options"),
    [
        (Setting(), {}),
        (Setting(), {"state": SUMS}),
        (Adding(), {"state": CombiningState(pa.schema([SUMS.field("n")]))}),
        (Adding(), {"state": CombiningState(pa.schema([SUMS.field("n"), ("more", pa.int64())]))}),
    ],
)
def test_sums_refuse_other_code(computation: Computation, options: dict[str, Any]):
    pond = Pond()
    pond.run(Adding(), "a", state=STATE)
    with pytest.raises(InvalidError, match=r"sums of another CombiningState.*CombiningState, n: int64"):
        pond.run(computation, "a", **options)
    pond.run(Adding(), "a", state=STATE)
    assert totals(pond) == {"a": (2, 20)}


MORE = pa.schema([("more", pa.int64()), *SUMS])


class AddingMore(Computation):
    def process_record(self, context, record):
        context.state.add({"n": 1, "total": 10, "more": 100})


@pytest.mark.parametrize(
    "upkeep", [KEEP_ALL, UpkeepPolicy(compaction=CompactionPolicy(fan_in=2, files_max=3))]
)
def test_sums_get_more_fields(upkeep: UpkeepPolicy):
    pond = Pond(upkeep=upkeep)
    pond.run(Setting(), "a", "b", state=SUMS)
    for _ in range(3):
        pond.run(Adding(), "a", "c", state=STATE)
    for _ in range(3):
        pond.run(AddingMore(), "a", "d", state=CombiningState(MORE))

    assert pond.states() == {
        "a": {"more": 300, "n": 7, "total": 70},
        "b": {"n": 1, "total": 10},
        "c": {"n": 3, "total": 30},
        "d": {"more": 300, "n": 3, "total": 30},
    }
    view = pond.store().rows_view("c").to_arrow()
    assert view.column("more").to_pylist() == [300, None, None, 300]
    with pytest.raises(InvalidError, match="sums of another CombiningState"):
        pond.run(Adding(), "a", state=STATE)
    assert verify_store(pond.objects).findings == ()


def test_text_with_fields_that_the_sums_lack_is_refused():
    pond = Pond()
    pond.store().load("c", [{"key": "a", "state": {"n": 5, "total": 7, "more": 1}}])
    with pytest.raises(InvalidError, match=r"cannot add to the computation's rows.*more"):
        pond.run(Adding(), "a", state=STATE)
    pond.run(AddingMore(), "a", state=CombiningState(MORE))
    assert pond.states() == {"a": {"more": 101, "n": 6, "total": 17}}


class Upgraded(Setting):
    state_version = 1

    def upgrade_state(self, state, version):
        return {"n": state["n"], "total": state["total"] + 1_000}


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("cache_mib", [0, 64])
@pytest.mark.parametrize("options", [{}, {"state": SUMS}])
def test_sums_are_upgraded_to_a_state_that_code_reads(options: dict[str, Any], cache_mib: int, offline: bool):
    pond = Pond(cache_mib=cache_mib)
    pond.run(Setting(), "a", state=SUMS)
    pond.run(Adding(), "a", "b", "a", state=STATE)
    if offline:
        graph = pond.pipeline(Upgraded(), **options).check()
        (done,) = upgrade_offline(pond.store(), graph, pond.clock, SeededRng("u"))
        assert (done.rows, done.current) == (2, 0)
    pond.run(Upgraded(), "a", **options)
    assert totals(pond) == {"a": (4, 1_040), "b": (1, 1_010 if offline else 10)}
    assert verify_store(pond.objects).findings == ()


def test_loaded_rows_are_added_to():
    pond = Pond()
    pond.store().load(
        "c", [{"key": "a", "state": {"n": 5, "total": 7}}, {"key": "z", "state": {"n": 1, "total": None}}]
    )
    pond.run(Adding(), "a", "b", state=STATE)
    assert totals(pond) == {"a": (6, 17), "b": (1, 10), "z": (1, None)}


def test_rewind_takes_back_what_was_added():
    pond = Pond()
    before = pond.run(Adding(), "a", "b", state=STATE)
    pond.run(Adding(), "a", "c", state=STATE)
    rewind(pond, before.version)
    assert totals(pond) == {"a": (1, 10), "b": (1, 10)}
    pond.run(Adding(), "a", state=STATE)
    assert totals(pond) == {"a": (2, 20), "b": (1, 10)}


def test_a_fork_and_its_origin_add_apart(tmp_path: Path):
    clock = ManualClock()

    def opened(name: str) -> Store:
        registry = MemoryRegistry()
        return Store.open(
            tmp_path / name,
            clock=clock,
            leases=lambda _, writer_id: MemoryLeases(registry, clock, writer_id=writer_id),
        )

    def run(store: Store, *keys: str) -> dict[str, int]:
        runner = LocalRunner(store, clock=clock, progress=False)
        with runner.start(Pond.pipeline(Adding(), state=STATE), stepping=True) as started:
            inject(started, *keys)
        return {row["key"]: row["n"] for row in store.rows_view("c").to_arrow().to_pylist()}

    with opened("pond") as store:
        assert run(store, "a", "b") == {"a": 1, "b": 1}
        fork_store(store, tmp_path / "fork")
        assert run(store, "a") == {"a": 2, "b": 1}
    with opened("fork") as fork:
        assert run(fork, "b", "b") == {"a": 1, "b": 3}


# ------------------------------------------------------------- compaction


@pytest.mark.parametrize("memory_bytes_max", [1 << 30, 0])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 64])
def test_compaction_changes_no_sum(
    monkeypatch: pytest.MonkeyPatch, memory_bytes_max: int, paged: bool, batch_rows: int
):
    """Files of text, of states with the schema, and of addends, in any neighbourhood."""
    monkeypatch.setattr(row_files, "_BATCH_ROWS_MIN", batch_rows)
    if paged:
        monkeypatch.setattr(row_format, "PAGED_BYTES_MIN", 0)
        monkeypatch.setattr(row_files, "COMPACTED_PAGED_BYTES_MIN", 0)
        monkeypatch.setattr(row_files, "LARGE_BYTES", 0)
    pond = Pond(upkeep=KEEP_ALL)
    names = [f"k{number:02d}" for number in range(12)]
    steps: Sequence[tuple[Computation, dict[str, Any]]] = [
        (Setting(), {}),
        (Setting(), {"state": SUMS}),
        *[(Adding(), {"state": STATE})] * 4,
    ]
    for number, (code, options) in enumerate(steps):
        chosen = [
            key for place, key in enumerate(names) if place % len(steps) >= number or place % 5 == number
        ]
        with pond.start(pond.pipeline(code, **options)) as run:
            run.inject("in", [{"t": 1, "id": f"{number} {key}", "k": key} for key in chosen])
            run.run_until_quiet()
    files = pond.snapshot().files_in("c")
    assert len(files) == len(steps)
    former = merge_updates(read_row_files(pond.objects, [file.path for file in files], keeps_cells=True))
    for start in range(len(files)):
        for stop in range(start + 2, len(files) + 1):
            compacted = compact_files(
                pond.objects,
                Compaction(interval=Interval("c"), files=files[start:stop], is_complete=not start),
                ALL,
                fence=Fence(Sequencer(1 << 30), CommitNumber(1)),
                token=f"{next(_TOKENS):032x}",
                memory_bytes_max=memory_bytes_max,
            )
            assert compacted.file is not None
            paths = [file.path for file in files[:start]] + [compacted.file.path]
            paths += [file.path for file in files[stop:]]
            found = merge_updates(read_row_files(pond.objects, paths, keeps_cells=True))
            assert sums_in(found) == sums_in(former)
            for key in ("k00", "k07", "none"):
                updates = read_row_files(pond.objects, paths, keys=[key], large=set(paths), keeps_cells=True)
                assert sums_in(merge_updates(updates)) == {
                    own: sums for own, sums in sums_in(former).items() if own == key
                }


def sums_in(rows: pa.Table) -> dict[str, Any]:
    assert not addend_columns_among(rows.column_names)
    found = {row["key"]: row["state"] for row in comparable(rows)}
    if column_of(SUMS) in rows.column_names:
        cells = rows.column(column_of(SUMS)).to_pylist()
        found |= {key: own for key, own in zip(found, cells, strict=True) if own is not None}
    return found


def test_runs_that_compact_fold_what_was_added():
    policy = CompactionPolicy(fan_in=2, files_max=3)
    pond = Pond(upkeep=UpkeepPolicy(compaction=policy, collect_every=2))
    for number in range(12):
        pond.run(Adding(), *"abc"[: 1 + number % 3], state=STATE)
    assert totals(pond) == {"a": (12, 120), "b": (8, 80), "c": (4, 40)}
    assert len(pond.snapshot().files_in("c")) < 24
    assert verify_store(pond.objects).findings == ()


def test_a_file_with_other_addends_is_damaged():
    column = AddendCodec(SUMS).column
    forged = pa.table(
        {
            "key": ["a"],
            "sequencer": pa.array([1], pa.int64()),
            "commit_number": pa.array([0], pa.int64()),
            "superstep": pa.array([1], pa.int64()),
            column.name: pa.array([{"n": "1"}], pa.struct([("n", pa.string())])),
        }
    )
    with pytest.raises(DataError, match="another schema in a column"):
        merge_updates(row_files.conform(forged, list(row_files.ROW_SCHEMA.names), keeps_cells=True))
