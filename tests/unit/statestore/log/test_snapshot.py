"""Snapshots: applied commits, live files, pruning and the chain."""

from __future__ import annotations

import orjson
import pytest

from millpond.statestore.errors import DataError, InternalError, InvalidError
from millpond.statestore.interval import Interval
from millpond.statestore.log.action import Action, Add, CommitInfo, Metadata, Protocol, Remove, Txn
from millpond.statestore.log.commit_file import decode, digest_of, encode
from millpond.statestore.log.files import LiveFile, row_file_to_add
from millpond.statestore.log.snapshot import NO_TABLE, RESTORED_VERSION, Snapshot
from millpond.statestore.rows.row import Fence, pack_fence
from millpond.statestore.types import CommitNumber, Sequencer, TableVersion
from tests.fixtures.commit_requests import row_file

FENCE = Fence(Sequencer(1), CommitNumber(1))
LOW, HIGH = Interval("counter", "", "m"), Interval("counter", "m")


def _add(path: str, computation: str = "counter", low: str | None = None, high: str | None = None) -> Add:
    stats = {"minValues": {"key": low}, "maxValues": {"key": high}} if low else None
    return Add(
        path=path,
        size_bytes=1,
        partition_values={"computation": computation},
        modification_time_ms=0,
        stats=None if stats is None else orjson.dumps(stats).decode(),
    )


def _apply(snapshot: Snapshot, *actions: Action) -> Snapshot:
    snapshot.apply(TableVersion(snapshot.version + 1), encode(actions))
    return snapshot


def _paths(files: tuple[LiveFile, ...]) -> list[str]:
    return [file.path for file in files]


class TestApply:
    def test_snapshot_starts_empty(self) -> None:
        snapshot = Snapshot()

        assert (snapshot.version, snapshot.digest, snapshot.file_count) == (NO_TABLE, "", 0)
        assert snapshot.configuration == {}
        assert snapshot.computations == ()

    def test_live_files_are_added_and_not_removed(self) -> None:
        snapshot = _apply(Snapshot(), _add("b"), _add("a", "other"))
        _apply(
            snapshot, Remove(path="b", deletion_time_ms=0), _add("c"), Remove(path="?", deletion_time_ms=0)
        )

        assert _paths(snapshot.files) == ["a", "c"]
        assert snapshot.computations == ("counter", "other")
        assert snapshot.file("b") is None
        _apply(snapshot, Remove(path="a", deletion_time_ms=0))
        assert snapshot.computations == ("counter",)
        assert snapshot.files_in("other") == ()

    def test_file_added_again_keeps_its_age(self) -> None:
        """Another engine may rewrite its statistics."""
        snapshot = _apply(_apply(Snapshot(), _add("a")), _add("a", low="k", high="l"))

        (file,) = snapshot.files
        assert (file.added_version, file.min_key) == (0, "k")

    def test_newest_metadata_and_protocol_apply(self) -> None:
        first = Metadata(table_id="1", name=None, schema_string="{}", configuration={"a": "1"})
        second = Metadata(table_id="1", name=None, schema_string="{}", configuration={"a": "2"})
        snapshot = _apply(Snapshot(), Protocol(), first, Txn(app_id="x", version=1))
        _apply(snapshot, Protocol(min_writer_version=7), second, Txn(app_id="x", version=5))

        assert snapshot.txns == {"x": 5}
        assert snapshot.configuration == {"a": "2"}
        assert snapshot.protocol.min_writer_version == 7

    def test_fence_is_transaction_of_interval(self) -> None:
        version = pack_fence(Sequencer(3), CommitNumber(4))
        snapshot = _apply(Snapshot(), Txn(app_id=LOW.app_id, version=version))

        assert snapshot.fence_of(LOW) == Fence(Sequencer(3), CommitNumber(4))
        assert snapshot.fence_of(HIGH) is None

    def test_rewind_drops_undone_watermarks(self) -> None:
        """A later watermark would make the repeated records late."""
        undone = {"watermarks": {LOW.app_id: 9, HIGH.app_id: 8}}
        snapshot = _apply(Snapshot(), CommitInfo(operation="x", timestamp_ms=0, millpond=undone))
        rewound = {"previous": snapshot.digest, RESTORED_VERSION: 3, "watermarks": {HIGH.app_id: 2}}
        _apply(snapshot, CommitInfo(operation="x", timestamp_ms=0, millpond=rewound))

        assert snapshot.watermarks == {HIGH.app_id: 2}

    def test_last_watermark_of_each_interval_is_kept(self) -> None:
        marks = {LOW.app_id: 5, HIGH.app_id: 6}
        snapshot = _apply(
            Snapshot(), CommitInfo(operation="x", timestamp_ms=0, millpond={"watermarks": marks})
        )
        later = {LOW.app_id: 9, HIGH.app_id: "soon"}
        info = CommitInfo(
            operation="x", timestamp_ms=0, millpond={"previous": snapshot.digest, "watermarks": later}
        )
        _apply(snapshot, info)

        assert snapshot.watermarks == {LOW.app_id: 9, HIGH.app_id: 6}

    def test_skipped_version_is_internal_error(self) -> None:
        with pytest.raises(InternalError):
            Snapshot().apply(TableVersion(1), encode((_add("a"),)))

    def test_newer_reader_protocol_is_refused(self) -> None:
        snapshot = _apply(Snapshot(), _add("a"))

        with pytest.raises(InvalidError, match="newer Delta reader"):
            _apply(snapshot, _add("b"), Protocol(min_reader_version=3))
        assert (snapshot.version, snapshot.file_count) == (0, 1)


class TestChain:
    def _commit(self, previous: str, path: str) -> bytes:
        info = CommitInfo(operation="x", timestamp_ms=0, millpond={"previous": previous})
        return encode((info, _add(path)))

    def test_commit_follows_digest_of_previous(self) -> None:
        first = self._commit("", "a")
        snapshot = Snapshot()
        snapshot.apply(TableVersion(0), first)

        snapshot.apply(TableVersion(1), self._commit(digest_of(first), "b"))

        assert snapshot.file_count == 2

    def test_broken_chain_names_both_files(self) -> None:
        snapshot = Snapshot()
        snapshot.apply(TableVersion(0), self._commit("", "a"))

        with pytest.raises(DataError, match=r"0001\.json.*0000\.json"):
            snapshot.apply(TableVersion(1), self._commit(digest_of(b"other"), "b"))
        assert (snapshot.version, snapshot.file_count) == (0, 1)

    def test_foreign_commit_is_part_of_chain(self) -> None:
        """The next commit of ours names its digest."""
        foreign = encode((_add("a"),))
        snapshot = Snapshot()
        snapshot.apply(TableVersion(0), foreign)

        with pytest.raises(DataError):
            snapshot.apply(TableVersion(1), self._commit(digest_of(foreign + b"\n"), "b"))
        snapshot.apply(TableVersion(1), self._commit(digest_of(foreign), "b"))


class TestFilesOfAnInterval:
    def _own(self, interval: Interval, low: str, high: str, version: int = 1) -> Add:
        file = row_file(interval, FENCE, keys=(low, high))
        return row_file_to_add(file, interval, version=TableVersion(version), modification_time_ms=0)

    def test_interval_has_only_its_files(self) -> None:
        low, high = self._own(LOW, "a", "b"), self._own(HIGH, "m", "z")
        snapshot = _apply(Snapshot(), low, high)

        assert _paths(snapshot.files_of(LOW)) == [low.path]
        assert _paths(snapshot.files_of(HIGH)) == [high.path]
        assert snapshot.files_of(Interval("unknown")) == ()

    def test_split_intervals_share_older_files(self) -> None:
        low, wide = self._own(Interval("counter"), "a", "f"), self._own(Interval("counter"), "g", "z")
        snapshot = _apply(Snapshot(), low, wide)

        assert _paths(snapshot.files_of(LOW)) == sorted([low.path, wide.path])
        assert _paths(snapshot.files_of(HIGH)) == [wide.path]

    def test_foreign_files_are_found_by_keys(self) -> None:
        snapshot = _apply(
            Snapshot(), _add("ab", low="a", high="b"), _add("lm", low="l", high="m"), _add("unknown")
        )

        assert _paths(snapshot.files_of(LOW)) == ["ab", "lm", "unknown"]
        assert _paths(snapshot.files_of(HIGH)) == ["lm", "unknown"]

    def test_unreadable_statistics_prune_nothing(self) -> None:
        add = Add(
            path="x",
            size_bytes=1,
            partition_values={"computation": "counter"},
            modification_time_ms=0,
            stats="{",
            tags={"interval": "not ours", "version": "many"},
        )
        snapshot = _apply(Snapshot(), add)

        assert _paths(snapshot.files_of(HIGH)) == ["x"]
        assert snapshot.files[0].added_version == 0


class TestRowFileToAdd:
    def test_statistics_round_trip(self) -> None:
        file = row_file(LOW, FENCE, superstep=7, keys=("a", "c"))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=5)

        (live,) = _apply(Snapshot(), add).files

        assert (live.path, live.size_bytes, live.computation) == (file.path, file.size_bytes, "counter")
        assert (live.min_key, live.max_key) == ("a", "c")
        assert (live.min_superstep, live.max_superstep) == (7, 7)
        assert (live.num_records, live.productions) == (10, 0)
        assert live.interval_id == LOW.app_id

    def test_rewritten_file_states_only_exact_facts(self) -> None:
        """A compaction's superstep is only an upper bound for its rows."""
        file = row_file(LOW, FENCE, superstep=7, keys=("a", "c"))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=5, rewrite=True)

        (live,) = _apply(Snapshot(), add).files

        assert (live.min_superstep, live.max_superstep) == (None, 7)
        assert "sequencer" not in (add.stats or "")
        assert not add.data_change

    @pytest.mark.parametrize("last", ["z", "\U0010ffff", "\ue000"])
    def test_long_keys_are_cut_to_bounds(self, last: str) -> None:
        low, high = "a" * 64 + "b", "k" * 64 + last + "x"
        file = row_file(LOW, FENCE, keys=(low, high))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=0)

        (live,) = _apply(Snapshot(), add).files

        assert live.min_key is not None
        assert live.min_key <= low
        assert live.max_key is None or live.max_key >= high
        assert len(add.stats or "") < 400

    def test_computation_with_unusual_name_round_trips(self) -> None:
        interval = Interval("a b%/ü")
        add = row_file_to_add(
            row_file(interval, FENCE), interval, version=TableVersion(0), modification_time_ms=0
        )

        assert decode(encode((add,))) == (add,)
