"""The index of live files, compared with a list."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.statestore.interval import Interval, intervals_from_boundaries
from millpond.statestore.log.files import FileIndex, LiveFile
from millpond.statestore.types import TableVersion

_KEYS: Final = "abcdef"
_FOREIGN: Final = ("", "not an interval")


@st.composite
def _intervals(draw: st.DrawFn) -> Interval:
    low = draw(st.sampled_from(["", *_KEYS]))
    high = draw(st.sampled_from([None, *(key for key in _KEYS if key > low)]))
    return Interval(draw(st.sampled_from(["c", "d"])), low, high)


@st.composite
def _files(draw: st.DrawFn) -> LiveFile:
    interval = draw(_intervals())
    low = draw(st.none() | st.sampled_from(_KEYS))
    high = draw(st.none() | st.sampled_from([key for key in _KEYS if low is None or key >= low]))
    named = draw(st.sampled_from([interval.app_id, interval.app_id, *_FOREIGN]))
    return live_file(
        draw(st.sampled_from([f"f{number}" for number in range(8)])),
        interval.computation,
        named,
        keys=(low, high),
        version=draw(st.integers(0, 3)),
    )


def live_file(
    path: str, computation: str, named: str, keys: tuple[str | None, str | None], version: int = 0
) -> LiveFile:
    return LiveFile(
        path=path,
        size_bytes=len(path),
        computation=computation,
        partition_values={"computation": computation},
        min_key=keys[0],
        max_key=keys[1],
        min_superstep=1,
        max_superstep=1,
        num_records=1,
        tags={"interval": named} if named else {},
        added_version=TableVersion(version),
    )


def _may_hold(file: LiveFile, interval: Interval) -> bool:
    if file.computation != interval.computation:
        return False
    if file.interval_id == interval.app_id:
        return True
    named = Interval.from_app_id(file.interval_id)
    if named is not None:
        ends_before = named.high is not None and named.high <= interval.low
        begins_after = interval.high is not None and interval.high <= named.low
        if ends_before or begins_after:
            return False
    return file.overlaps(interval)


@given(st.lists(st.tuples(st.booleans(), _files()), max_size=30), st.lists(_intervals(), min_size=1))
def test_index_matches_list(changes: list[tuple[bool, LiveFile]], wanted: list[Interval]) -> None:
    index, model = FileIndex(), dict[str, LiveFile]()
    for is_added, file in changes:
        if is_added:
            index.put(file)
            model[file.path] = file
        else:
            index.remove(file.path)
            model.pop(file.path, None)
        ordered = sorted(model.values(), key=lambda one: (one.added_version, one.path))

        assert index.files == tuple(ordered)
        assert index.computations == tuple(sorted({one.computation for one in ordered}))
        assert index.size_bytes == sum(one.size_bytes for one in ordered)
        for computation in ("c", "d"):
            assert index.files_in(computation) == tuple(
                one for one in ordered if one.computation == computation
            )
        for interval in wanted:
            assert index.files_of(interval) == tuple(one for one in ordered if _may_hold(one, interval))


def test_statistics_follow_their_file() -> None:
    index = FileIndex()
    for path, statistics in (("a", "1"), ("b", "2"), ("b", "3"), ("c", "4"), ("c", None)):
        index.put(live_file(path, "c", "", (None, None)), statistics)
    index.remove("a")

    assert [index.statistics_of(path) for path in ("a", "b", "c")] == [None, "3", None]


def test_interval_is_compared_with_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a thousand intervals is parsed once."""
    intervals = intervals_from_boundaries("c", [f"{number:04d}" for number in range(1, 1_000)])
    index, parsed = FileIndex(), list[str]()
    for interval in intervals:
        index.put(live_file(f"{interval.low}.parquet", "c", interval.app_id, (interval.low, interval.low)))
    parse = Interval.from_app_id

    def parse_noted(app_id: str) -> Interval | None:
        parsed.append(app_id)
        return parse(app_id)

    monkeypatch.setattr(Interval, "from_app_id", parse_noted)
    monkeypatch.setattr(LiveFile, "overlaps", None)

    assert [file.min_key for one in intervals for file in index.files_of(one)] == [
        one.low for one in intervals
    ]
    assert sorted(parsed) == sorted(one.app_id for one in intervals)
