"""The snapshot: applied commits, live files, pruning, the chain."""

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
    def test_a_fresh_snapshot_is_no_table(self) -> None:
        """Before the first commit there is nothing."""
        snapshot = Snapshot()

        assert (snapshot.version, snapshot.digest, snapshot.file_count) == (NO_TABLE, "", 0)
        assert snapshot.configuration == {}
        assert snapshot.computations == ()

    def test_adds_and_removes_make_the_live_files(self) -> None:
        """What was added and not removed is live, in the order in which it came."""
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

    def test_a_file_added_again_keeps_its_age(self) -> None:
        """Another engine that rewrites a file's statistics does not make the file newer."""
        snapshot = _apply(_apply(Snapshot(), _add("a")), _add("a", low="k", high="l"))

        (file,) = snapshot.files
        assert (file.added_version, file.min_key) == (0, "k")

    def test_the_newest_transaction_metadata_and_protocol_count(self) -> None:
        """Later values of an application, the metadata and the protocol replace earlier ones."""
        first = Metadata(table_id="1", name=None, schema_string="{}", configuration={"a": "1"})
        second = Metadata(table_id="1", name=None, schema_string="{}", configuration={"a": "2"})
        snapshot = _apply(Snapshot(), Protocol(), first, Txn(app_id="x", version=1))
        _apply(snapshot, Protocol(min_writer_version=7), second, Txn(app_id="x", version=5))

        assert snapshot.txns == {"x": 5}
        assert snapshot.configuration == {"a": "2"}
        assert snapshot.protocol.min_writer_version == 7

    def test_the_fence_is_the_intervals_transaction(self) -> None:
        """The stored fence is read off the interval's application id."""
        version = pack_fence(Sequencer(3), CommitNumber(4))
        snapshot = _apply(Snapshot(), Txn(app_id=LOW.app_id, version=version))

        assert snapshot.fence_of(LOW) == Fence(Sequencer(3), CommitNumber(4))
        assert snapshot.fence_of(HIGH) is None

    def test_a_rewind_ends_the_watermarks_of_what_it_undoes(self) -> None:
        """Where the version that comes back knows none, there is none: a later one would be too late by what was undone."""
        undone = {"watermarks": {LOW.app_id: 9, HIGH.app_id: 8}}
        snapshot = _apply(Snapshot(), CommitInfo(operation="x", timestamp_ms=0, millpond=undone))
        rewound = {"previous": snapshot.digest, RESTORED_VERSION: 3, "watermarks": {HIGH.app_id: 2}}
        _apply(snapshot, CommitInfo(operation="x", timestamp_ms=0, millpond=rewound))

        assert snapshot.watermarks == {HIGH.app_id: 2}

    def test_journaled_watermarks_are_kept(self) -> None:
        """The last watermark of each interval is remembered; nonsense is not."""
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

    def test_commits_are_applied_in_order(self) -> None:
        """Skipping a version is a bug, not a state."""
        with pytest.raises(InternalError):
            Snapshot().apply(TableVersion(1), encode((_add("a"),)))

    def test_a_newer_reader_version_is_refused(self) -> None:
        """A table that asks for a reader we are not is refused, and the snapshot stays as it was."""
        snapshot = _apply(Snapshot(), _add("a"))

        with pytest.raises(InvalidError, match="newer Delta reader"):
            _apply(snapshot, _add("b"), Protocol(min_reader_version=3))
        assert (snapshot.version, snapshot.file_count) == (0, 1)


class TestChain:
    def _commit(self, previous: str, path: str) -> bytes:
        info = CommitInfo(operation="x", timestamp_ms=0, millpond={"previous": previous})
        return encode((info, _add(path)))

    def test_a_commit_follows_the_bytes_before_it(self) -> None:
        """Commits that name the digest of the one before are applied."""
        first = self._commit("", "a")
        snapshot = Snapshot()
        snapshot.apply(TableVersion(0), first)

        snapshot.apply(TableVersion(1), self._commit(digest_of(first), "b"))

        assert snapshot.file_count == 2

    def test_a_broken_chain_is_refused_and_named(self) -> None:
        """A commit built on other bytes raises DataError with both files, and changes nothing."""
        snapshot = Snapshot()
        snapshot.apply(TableVersion(0), self._commit("", "a"))

        with pytest.raises(DataError, match=r"0001\.json.*0000\.json"):
            snapshot.apply(TableVersion(1), self._commit(digest_of(b"other"), "b"))
        assert (snapshot.version, snapshot.file_count) == (0, 1)

    def test_foreign_commits_are_links_too(self) -> None:
        """A commit of another engine has no link of its own, and the next one names its bytes."""
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

    def test_an_intervals_own_files_are_its_files(self) -> None:
        """Files written for an interval are found, those of its neighbours are not."""
        low, high = self._own(LOW, "a", "b"), self._own(HIGH, "m", "z")
        snapshot = _apply(Snapshot(), low, high)

        assert _paths(snapshot.files_of(LOW)) == [low.path]
        assert _paths(snapshot.files_of(HIGH)) == [high.path]
        assert snapshot.files_of(Interval("unknown")) == ()

    def test_files_of_older_boundaries_are_found_by_their_keys(self) -> None:
        """After a split the parts see the whole's files that can hold their keys."""
        low, wide = self._own(Interval("counter"), "a", "f"), self._own(Interval("counter"), "g", "z")
        snapshot = _apply(Snapshot(), low, wide)

        assert _paths(snapshot.files_of(LOW)) == sorted([low.path, wide.path])
        assert _paths(snapshot.files_of(HIGH)) == [wide.path]

    def test_foreign_files_are_found_by_their_keys(self) -> None:
        """A rewrite by another engine belongs to every interval whose keys it can hold."""
        snapshot = _apply(
            Snapshot(), _add("ab", low="a", high="b"), _add("lm", low="l", high="m"), _add("unknown")
        )

        assert _paths(snapshot.files_of(LOW)) == ["ab", "lm", "unknown"]
        assert _paths(snapshot.files_of(HIGH)) == ["lm", "unknown"]

    def test_unreadable_statistics_prune_nothing(self) -> None:
        """Statistics are hints: what cannot be read may hold anything."""
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
    def test_the_statistics_come_back(self) -> None:
        """What is known of a row file is known of the live file."""
        file = row_file(LOW, FENCE, superstep=7, keys=("a", "c"))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=5)

        (live,) = _apply(Snapshot(), add).files

        assert (live.path, live.size_bytes, live.computation) == (file.path, file.size_bytes, "counter")
        assert (live.min_key, live.max_key) == ("a", "c")
        assert (live.min_superstep, live.max_superstep) == (7, 7)
        assert (live.num_records, live.productions) == (10, 0)
        assert live.interval_id == LOW.app_id

    def test_a_rewrite_states_only_what_is_exact(self) -> None:
        """A compaction holds older rows, so its superstep is a bound from above and its fence is not stated."""
        file = row_file(LOW, FENCE, superstep=7, keys=("a", "c"))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=5, rewrite=True)

        (live,) = _apply(Snapshot(), add).files

        assert (live.min_superstep, live.max_superstep) == (None, 7)
        assert "sequencer" not in (add.stats or "")
        assert not add.data_change

    @pytest.mark.parametrize("last", ["z", "\U0010ffff", "\ue000"])
    def test_long_keys_are_cut_to_bounds(self, last: str) -> None:
        """The statistics of long keys are short, and still a lower and an upper bound."""
        low, high = "a" * 64 + "b", "k" * 64 + last + "x"
        file = row_file(LOW, FENCE, keys=(low, high))
        add = row_file_to_add(file, LOW, version=TableVersion(0), modification_time_ms=0)

        (live,) = _apply(Snapshot(), add).files

        assert live.min_key is not None
        assert live.min_key <= low
        assert live.max_key is None or live.max_key >= high
        assert len(add.stats or "") < 400

    def test_the_file_is_committed_as_delta_has_it(self) -> None:
        """The add action of a computation with an unusual name survives the way through the log."""
        interval = Interval("a b%/ü")
        add = row_file_to_add(
            row_file(interval, FENCE), interval, version=TableVersion(0), modification_time_ms=0
        )

        assert decode(encode((add,))) == (add,)
