"""``mp.replay`` and ``mp.compare_stores``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import millpond as mp
from millpond.executor.replay import replay as beginning
from millpond.executor.replay.fork import fork_store
from millpond.statestore.errors import UnavailableError
from millpond.testing.fixtures.determinism import ManualClock

ROWS = [{"k": key, "at": at, "n": at % 7} for at in range(1, 13) for key in "ab"]


class Alarm(mp.Computation):
    """A sum with an alarm at a limit, and another alarm a second of wall time later."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def process_record(self, context, record):
        state = context.state.get({"sum": 0, "alarms": 0})
        total = state["sum"] + record.value["n"]
        is_alarm = record.key == "a" and total >= self.limit
        context.state.set({"sum": total, "alarms": state["alarms"] + is_alarm})
        if is_alarm:
            context.produce("alarms", {"key": record.key, "sum": total})
            context.set_timer(context.wall_time + 1_000_000, "again", domain="wall")

    def process_timer(self, context, timer):
        context.state.set({**context.state.get(), "again": timer.at})
        context.produce("alarms", {"key": context.key, "again": True})


def a_pipeline(limit: int, sink: Path | None = None, key: str = "k") -> mp.Pipeline:
    pipeline = mp.Pipeline("p")
    alarms = pipeline.inject("in", key=key, at="at").apply(Alarm(limit), name="alarm", produces="alarms")
    if sink is not None:
        alarms.sink("out", mp.DeltaSink(str(sink)))
    return pipeline


def inject(
    pond: Path, hosts: str, clock: ManualClock, rows: Sequence[Any], sink: Path | None = None, limit: int = 15
) -> None:
    """Inject three rows a superstep, one a second."""
    runner = mp.LocalRunner(pond, zookeeper=hosts, progress=False, clock=clock)
    with runner.start(a_pipeline(limit, sink), stepping=True) as run:
        for first in range(0, len(rows), 3):
            run.inject("in", list(rows[first : first + 3]))
            run.step()
            clock.advance_ms(700)
        run.run_until_quiet()


@pytest.fixture
def pond(tmp_path: Path, zookeeper_hosts: str) -> Path:
    """A store whose rows were injected, with alarms in a sink."""
    inject(tmp_path / "pond", zookeeper_hosts, ManualClock(), ROWS, tmp_path / "alarms")
    return tmp_path / "pond"


def version_after(pond: Path, rows: int, position: str = "millpond/injected/p/in") -> int:
    with mp.Store.open(pond, read_only=True) as store:
        versions = range(store.snapshot().version + 1)
        return min(at for at in versions if store.snapshot(at).txns.get(position) == rows)


def replay(pond: Path, new: Path, pipeline: mp.Pipeline, rows: Any, **options: Any) -> mp.types.Replayed:
    with mp.Store.open(pond, read_only=True) as store:
        return mp.replay(store, new, pipeline, {"in": rows}, **options)


def compare(new: Path, pond: Path, **options: Any) -> mp.types.StoreDifference:
    with mp.Store.open(new, read_only=True) as one, mp.Store.open(pond, read_only=True) as other:
        return mp.compare_stores(one, other, **options)


@pytest.mark.parametrize("begins", [0, 9, 24])
def test_replay_of_the_same_code_is_equal(pond: Path, zookeeper_hosts: str, begins: int) -> None:
    """Holds for states, wall timers and sinks, from any version."""
    version = version_after(pond, begins) if begins else 0
    new = pond.with_name("new")
    done = replay(
        pond, new, a_pipeline(15, pond.with_name("alarms")), ROWS, version=version, zookeeper=zookeeper_hosts
    )
    difference = compare(new, pond)

    assert difference.is_empty, difference.rows.to_pylist()
    assert [part.name for part in difference.computations] == ["alarm"]
    assert [(part.equal > 0, part.is_empty) for part in difference.sinks] == [(True, True)]
    assert (done.version, done.supersteps > 0) == (version, begins < 24 or done.supersteps > 0)


@pytest.mark.parametrize("on_ahead", ["clamp", "hold", "dead_letter"])
def test_replay_uses_the_recorded_arrival(tmp_path: Path, zookeeper_hosts: str, on_ahead: Any) -> None:
    """Every look at this clock is at another time, and the machine's shows a later one when the replay runs."""

    def made() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        stream = pipeline.inject("in", key="k", at="at", ahead_max="3us", on_ahead=on_ahead)
        stream.apply(Times(), name="times")
        return pipeline

    pond, new = tmp_path / "pond", tmp_path / "new"
    rows = [{**row, "at": row["at"] + 2**50 * (row["n"] > 3)} for row in ROWS]
    runner = mp.LocalRunner(
        pond, zookeeper=zookeeper_hosts, progress=False, clock=TickingClock(0), dead_letter_limit=None
    )
    with runner.start(made(), stepping=True) as run:
        for first in range(0, len(rows), 6):
            run.inject("in", rows[first : first + 6])
            run.step()
        run.run_until_quiet()
        counts = run.summary().run
    replay(pond, new, made(), rows, version=0, zookeeper=zookeeper_hosts)

    assert counts.dead_letters == sum(row["n"] > 3 for row in rows) * (on_ahead == "dead_letter")
    assert compare(new, pond).is_empty


class TickingClock(ManualClock):
    def now_us(self) -> Any:
        self.jump_ms(1)
        return super().now_us()


class Times(mp.Computation):
    def process_record(self, context, record):
        context.state.set([*context.state.get([]), record.at])


def test_replay_with_a_changed_constant_differs_in_affected_keys(pond: Path, zookeeper_hosts: str) -> None:
    """The original's sink must stay unchanged."""
    new, sink = pond.with_name("new"), pond.with_name("alarms")
    before = DeltaTable(str(sink)).version()
    replay(pond, new, a_pipeline(30, sink), ROWS, version=version_after(pond, 9), zookeeper=zookeeper_hosts)
    difference = compare(new, pond)

    assert not difference.is_empty
    assert set(difference.rows.column("key").to_pylist()) == {"a"}
    [alarms] = difference.sinks
    assert alarms.missing > alarms.added
    assert {json.loads(row)["key"] for row in difference.sink_rows.column("row").to_pylist()} == {"a"}
    assert DeltaTable(str(sink)).version() == before
    with difference.to_duckdb() as database:
        assert database.sql("select count(*) from rows").fetchall() == [(1,)]


def test_since_version_takes_only_the_later_rows(pond: Path, zookeeper_hosts: str) -> None:
    version = version_after(pond, 9)
    pipeline = a_pipeline(15, pond.with_name("alarms"))
    with pytest.raises(mp.InvalidError, match="fewer rows"):
        replay(pond, pond.with_name("x"), pipeline, ROWS[9:], version=version, zookeeper=zookeeper_hosts)
    new = pond.with_name("new")
    replay(pond, new, pipeline, ROWS[9:], version=version, since_version=True, zookeeper=zookeeper_hosts)

    assert compare(new, pond).is_empty


def test_replay_until_a_version_is_compared_with_that_version(pond: Path, zookeeper_hosts: str) -> None:
    new, until = pond.with_name("new"), version_after(pond, 15)
    pipeline = a_pipeline(15, pond.with_name("alarms"))
    replay(pond, new, pipeline, ROWS, version=0, until=until, zookeeper=zookeeper_hosts)

    assert compare(new, pond).is_empty
    assert compare(new, pond).other_version == until
    with mp.Store.open(pond, read_only=True) as store:
        newest = store.snapshot().version
    assert not compare(new, pond, other_version=newest).is_empty


@pytest.mark.parametrize("fails_after", [1, 4])
def test_interrupted_replay_is_resumed_with_the_same_arguments(
    pond: Path, zookeeper_hosts: str, fails_after: int
) -> None:
    """Other arguments are refused."""
    new, pipeline = pond.with_name("new"), a_pipeline(15, pond.with_name("alarms"))

    def fail(done: int, of: int) -> None:
        assert done <= of
        if done == fails_after:
            raise UnavailableError("the machine was switched off")

    with pytest.raises(UnavailableError, match="switched off"):
        replay(pond, new, pipeline, ROWS, version=0, zookeeper=zookeeper_hosts, told=fail)
    with pytest.raises(mp.InvalidError, match="the replay is incomplete"):
        compare(new, pond)
    with pytest.raises(mp.InvalidError, match="another replay"):
        replay(pond, new, pipeline, ROWS, version=version_after(pond, 3), zookeeper=zookeeper_hosts)
    replay(pond, new, pipeline, ROWS, version=0, zookeeper=zookeeper_hosts)

    assert compare(new, pond).is_empty


def test_replay_killed_after_its_fork_is_resumed(
    pond: Path, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork and description appear at once, so the same call finds both."""
    new, pipeline = pond.with_name("new"), a_pipeline(15, pond.with_name("alarms"))

    def killed(*arguments: Any, **options: Any) -> None:
        fork_store(*arguments, **options)
        raise UnavailableError("the machine was switched off")

    with monkeypatch.context() as patched:
        patched.setattr(beginning, "fork_store", killed)
        with pytest.raises(UnavailableError, match="switched off"):
            replay(pond, new, pipeline, ROWS, version=0, zookeeper=zookeeper_hosts)
    replay(pond, new, pipeline, ROWS, version=0, zookeeper=zookeeper_hosts)

    assert compare(new, pond).is_empty


def test_replay_is_unaffected_by_later_supersteps_of_the_original(pond: Path, zookeeper_hosts: str) -> None:
    new, pipeline = pond.with_name("new"), a_pipeline(15, pond.with_name("alarms"))
    with mp.Store.open(pond, read_only=True) as store:
        newest = store.snapshot().version
        mp.replay(store, new, pipeline, {"in": ROWS}, version=0, zookeeper=zookeeper_hosts)
    late = ManualClock(1_800_000_000_000_000)
    inject(pond, zookeeper_hosts, late, [{"k": "a", "at": 99, "n": 1}], pond.with_name("alarms"))

    assert compare(new, pond).is_empty
    assert compare(new, pond).other_version == newest


def test_replay_without_recorded_supersteps_runs_once(pond: Path, zookeeper_hosts: str) -> None:
    """The rows are processed as if they had arrived together."""
    new = pond.with_name("new")
    done = replay(
        pond,
        new,
        a_pipeline(15),
        ROWS,
        version=version_after(pond, 9),
        recorded=False,
        zookeeper=zookeeper_hosts,
    )
    with mp.Store.open(new, read_only=True) as store:
        states = store.rows_view("alarm").to_arrow().column("state").to_pylist()

    assert done.supersteps == 0
    assert [json.loads(state)["sum"] for state in states] == [sum(at % 7 for at in range(1, 13))] * 2


@pytest.mark.parametrize("finish", [True, False])
def test_replay_of_bounded_runs_is_equal(
    tmp_path: Path, zookeeper_hosts: str, finish: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows and late data must agree, whether the input has ended or continues each day."""

    def windows(minutes: int = 1) -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        source = pipeline.inject("in", key="k", at="at", watermark=mp.BoundedDisorder("1s"))
        counted = source.window(mp.FixedWindows(f"{minutes}m")).combine(mp.Count(), name="counted")
        counted.sink("out", mp.DeltaSink(str(tmp_path / "out")))
        return pipeline

    rows = [{"k": "ab"[i % 2], "at": (i * 7 % 400) * 1_000_000} for i in range(400)]
    pond, new = tmp_path / "pond", tmp_path / "new"
    runner = mp.LocalRunner(pond, zookeeper=zookeeper_hosts, progress=False)
    for day in (150, 260, 400):
        last = day == 400
        runner.run(windows(), {"in": rows[:day]}, finish=finish and last) if last or not finish else None
    with mp.Store.open(pond, read_only=True) as store:
        mp.replay(store, new, windows(), {"in": rows}, version=0, zookeeper=zookeeper_hosts)
    assert compare(new, pond).is_empty

    assert "not what the original consumed" not in caplog.text
    edited = [*rows[:9], {**rows[9], "n": 1}, *rows[10:]]
    with mp.Store.open(pond, read_only=True) as store:
        mp.replay(store, tmp_path / "edited", windows(), {"in": edited}, version=0, zookeeper=zookeeper_hosts)
    assert "the input is not what the original consumed" in caplog.text

    other = tmp_path / "other"
    with mp.Store.open(pond, read_only=True) as store:
        mp.replay(store, other, windows(2), {"in": rows}, version=0, zookeeper=zookeeper_hosts)
    assert not compare(other, pond).is_empty


def test_replay_of_sorted_input_passes_records_in_the_same_superstep(
    tmp_path: Path, zookeeper_hosts: str
) -> None:
    """Otherwise they wait for the next one, which the version to compare with does not have."""

    class Seen(mp.Computation):
        time_sorted = True

        def process_record(self, context, record):
            context.state.set([*context.state.get([]), record.value["at"]])

    def pipeline() -> mp.Pipeline:
        pipeline = mp.Pipeline("p")
        pipeline.inject("in", key="k", at="at").apply(Seen(), name="seen")
        return pipeline

    pond, new = tmp_path / "pond", tmp_path / "new"
    mp.LocalRunner(pond, zookeeper=zookeeper_hosts, progress=False).run(pipeline(), {"in": ROWS[::-1]})
    until = version_after(pond, len(ROWS), "millpond/input/p/in/local")
    with mp.Store.open(pond, read_only=True) as store:
        mp.replay(
            store, new, pipeline(), {"in": ROWS[::-1]}, version=0, until=until, zookeeper=zookeeper_hosts
        )

    assert compare(new, pond, other_version=until).is_empty


def test_renamed_pipeline_can_be_replayed(pond: Path, zookeeper_hosts: str) -> None:
    renamed = mp.Pipeline("q", renamed_from="p")
    alarms = renamed.inject("in", key="k", at="at").apply(Alarm(15), name="alarm", produces="alarms")
    alarms.sink("out", mp.DeltaSink(str(pond.with_name("alarms"))))
    replay(
        pond, pond.with_name("new"), renamed, ROWS, version=version_after(pond, 9), zookeeper=zookeeper_hosts
    )

    assert compare(pond.with_name("new"), pond).is_empty


def test_invalid_replays_are_refused(pond: Path, zookeeper_hosts: str) -> None:
    other = mp.Pipeline("q")
    other.inject("in", key="k", at="at").apply(Alarm(1), name="alarm", produces="alarms")
    with pytest.raises(mp.InvalidError, match="no pipeline of that name"):
        replay(pond, pond.with_name("x"), other, ROWS, version=0)
    with pytest.raises(mp.InvalidError, match="comes before its first"):
        replay(pond, pond.with_name("x"), a_pipeline(1), ROWS, version=3, until=2)
    with pytest.raises(mp.InvalidError, match="there is a store at this path"):
        replay(pond, pond, a_pipeline(1), ROWS, version=0)
    with mp.Store.open(pond, read_only=True) as store, pytest.raises(mp.InvalidError, match="not given"):
        mp.replay(store, pond.with_name("x"), a_pipeline(1), {}, version=0, zookeeper=zookeeper_hosts)


def test_replay_across_dropped_letters_is_refused(pond: Path, zookeeper_hosts: str) -> None:
    """Requests by tools are not part of the input."""
    inject(pond, zookeeper_hosts, ManualClock(1_800_000_000_000_000), [{"k": "a", "at": "no time", "n": 1}])
    with mp.Store.open(pond, zookeeper_hosts) as store:
        mp.drop_dead_letters(store, computation="alarm")
    with pytest.raises(mp.InvalidError, match="asked for once more, or dropped"):
        replay(pond, pond.with_name("x"), a_pipeline(15), ROWS, version=0, zookeeper=zookeeper_hosts)


@pytest.fixture
def rewound(pond: Path, zookeeper_hosts: str) -> Path:
    """A store that was rewound and ran again."""
    from click.testing import CliRunner

    from millpond.cli.main import main

    arguments = [
        "rewind",
        str(pond),
        "--version",
        str(version_after(pond, 9)),
        "--yes",
        "--zookeeper",
        zookeeper_hosts,
    ]
    result = CliRunner().invoke(main, [*arguments, "--take-back", str(pond.with_name("alarms"))])
    assert result.exit_code == 0, result.output
    inject(pond, zookeeper_hosts, ManualClock(1_800_000_000_000_000), ROWS[9:15], pond.with_name("alarms"))
    return pond


def test_replay_across_a_rewind_is_refused(rewound: Path, zookeeper_hosts: str) -> None:
    """A replay from after the rewind works."""
    pipeline = a_pipeline(15, rewound.with_name("alarms"))
    with pytest.raises(mp.InvalidError, match="went back to an older version in between"):
        replay(rewound, rewound.with_name("x"), pipeline, ROWS, version=0, zookeeper=zookeeper_hosts)
    with mp.Store.open(rewound, read_only=True) as store:
        versions = range(store.snapshot().version + 1)
        began = max(at for at in versions if store.snapshot(at).txns.get("millpond/injected/p/in") == 9)
    new = rewound.with_name("new")
    replay(rewound, new, pipeline, ROWS, version=began, zookeeper=zookeeper_hosts)
    assert compare(new, rewound).is_empty
