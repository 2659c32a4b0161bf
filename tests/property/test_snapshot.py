"""The snapshot against a model of plain dictionaries, applied incrementally and loaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.errors import DataError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, Other, Remove, Txn
from millpond.statestore.log.commit_file import decode, digest_of, encode
from millpond.statestore.log.log import Log
from millpond.statestore.log.snapshot import Snapshot, load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.types import TableVersion

_keys = st.text(max_size=3)
_paths = st.sampled_from([f"f{number}" for number in range(8)])
_app_ids = st.sampled_from(["a", "b", Interval("c", "", "m").app_id, Interval("c", "m").app_id])
_computations = st.sampled_from(["c", "d", "e f/%"])


@st.composite
def _adds(draw: st.DrawFn) -> Add:
    return Add(
        path=draw(_paths),
        size_bytes=draw(st.integers(0, 9)),
        partition_values={"computation": draw(_computations)},
        modification_time_ms=0,
        tags=draw(st.fixed_dictionaries({}, optional={"interval": _app_ids})),
    )


_removes = st.builds(Remove, path=_paths, deletion_time_ms=st.just(0), data_change=st.booleans())
_txns = st.builds(Txn, app_id=_app_ids, version=st.integers(0, 2**63 - 1))
_commits = st.lists(
    st.tuples(st.booleans(), st.lists(st.one_of(_adds(), _removes, _txns), min_size=1, max_size=6)),
    min_size=1,
    max_size=8,
)


def _write(commits: list[tuple[bool, list[Action]]]) -> tuple[Log, list[bytes]]:
    """Write a log of Millpond's sealed and chained commits, and of other engines' commits."""
    log, previous, files = Log(MemoryObjects()), "", []
    for version, (ours, actions) in enumerate(commits):
        info = CommitInfo(operation="x", timestamp_ms=0, millpond={"previous": previous} if ours else None)
        files.append(encode((info, *actions)))
        log.put(TableVersion(version), files[-1])
        previous = digest_of(files[-1])
    return log, files


def _facts(snapshot: Snapshot) -> tuple[object, ...]:
    return snapshot.version, snapshot.digest, snapshot.files, snapshot.txns, snapshot.computations


@given(_commits)
def test_applied_and_loaded_snapshots_equal_the_model(commits: list[tuple[bool, list[Action]]]) -> None:
    """They are compared at every version."""
    log, files = _write(commits)
    applied = Snapshot()
    live: dict[str, Add] = {}
    txns: dict[str, int] = {}
    for version, (_ours, actions) in enumerate(commits):
        applied.apply(TableVersion(version), files[version])
        for action in actions:
            if isinstance(action, Add):
                live[action.path] = action
            elif isinstance(action, Remove):
                live.pop(action.path, None)
            elif isinstance(action, Txn):
                txns[action.app_id] = action.version

        assert {file.path: (file.computation, file.size_bytes) for file in applied.files} == {
            path: (add.partition_values["computation"], add.size_bytes) for path, add in live.items()
        }
        assert applied.txns == txns
        assert _facts(load(log, TableVersion(version))) == _facts(applied)
    assert _facts(load(log)) == _facts(applied)


@given(_commits, _keys)
def test_intervals_over_all_keys_cover_all_files(commits: list[tuple[bool, list[Action]]], cut: str) -> None:
    """Any engine may have written them."""
    log, _files = _write(commits)
    snapshot = load(log)
    for computation in snapshot.computations:
        low, high = Interval(computation, "", cut or "m"), Interval(computation, cut or "m")
        paths = {file.path for interval in (low, high) for file in snapshot.files_of(interval)}
        assert paths == {file.path for file in snapshot.files_in(computation)}


_file_names = st.text(st.characters(exclude_characters="/", exclude_categories=("Cc", "Cs")), max_size=20)


@given(_file_names, st.text(max_size=20), st.dictionaries(st.text(max_size=5), st.text(max_size=5)))
def test_any_text_round_trips_through_a_commit_file(name: str, value: str, tags: dict[str, str]) -> None:
    add = Add(
        path=f"computation=c/{name}.parquet",
        size_bytes=1,
        partition_values={"computation": value},
        modification_time_ms=0,
        tags=tags,
    )

    assert decode(encode((add, Txn(app_id=value, version=1)))) == (add, Txn(app_id=value, version=1))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_actions_or_a_data_error(data: bytes) -> None:
    try:
        actions = decode(data, "f")
    except DataError:
        return
    assert all(isinstance(action, Add | Remove | Txn | CommitInfo | Other) for action in actions)


@given(st.data())
def test_damage_of_a_chained_log_raises_or_changes_nothing(data: st.DataObject) -> None:
    """The last commit has no successor to reveal its damage."""
    commits = data.draw(st.lists(st.lists(_adds(), min_size=1, max_size=3), min_size=2, max_size=5))
    log, files = _write([(True, list(adds)) for adds in commits])
    before = _facts(load(log))
    version = data.draw(st.integers(0, len(files) - 2))
    at = data.draw(st.integers(0, len(files[version]) - 1))
    changed = bytearray(files[version])
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    log.objects.put(f"_delta_log/{version:020d}.json", bytes(changed))

    try:
        after = _facts(load(log))
    except DataError:
        return
    raise AssertionError(f"{before} became {after} without an error")
