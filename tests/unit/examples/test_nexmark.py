"""The Nexmark example: its generator and the arithmetic of its queries."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner

from examples.nexmark.__main__ import main
from examples.nexmark.answers import differences, read_answer
from examples.nexmark.auction_list_queries import AtLeastAverage
from examples.nexmark.auction_queries import running_means
from examples.nexmark.element_queries import in_euro
from examples.nexmark.events import ANSWERS, DATA, KINDS, Events, load_events, text_of
from examples.nexmark.generator import BLOCK, Generator
from examples.nexmark.queries import QUERIES
from examples.nexmark.statistics_queries import BidStatistics, PriceStatistics
from examples.nexmark.texts import HOT_CHANNELS
from examples.nexmark.window_queries import Highest

_COUNT = 20_000


@pytest.fixture(scope="module")
def events() -> Events:
    return Generator(seed=1).events(_COUNT)


def _numbers(table: pa.Table, column: str) -> Any:
    return table.column(column).to_numpy()


class TestGenerator:
    def test_people_auctions_and_bids_occur_as_1_to_3_to_46(self, events: Events) -> None:
        assert [events[kind].num_rows for kind in KINDS] == [
            _COUNT // 50,
            3 * _COUNT // 50,
            46 * _COUNT // 50,
        ]

    def test_same_seed_gives_the_same_events(self, events: Events) -> None:
        again, other = Generator(seed=1).events(_COUNT), Generator(seed=2).events(_COUNT)

        assert all(events[kind].equals(again[kind]) for kind in KINDS)
        assert not any(events[kind].equals(other[kind]) for kind in KINDS)

    @pytest.mark.parametrize("first", [0, 17, BLOCK - 40, BLOCK])
    def test_part_of_the_events_can_be_generated_alone(self, first: int) -> None:
        """A part must equal the same slice of the whole."""
        generator = Generator(seed=3, out_of_order=10)
        whole, before = generator.events(first + 120), generator.events(first) if first else None
        part = generator.events(120, first)
        for kind in KINDS:
            skipped = before[kind].num_rows if before else 0
            assert part[kind].equals(whole[kind].slice(skipped).combine_chunks())

    def test_ids_count_up_from_1000(self, events: Events) -> None:
        for kind in ("persons", "auctions"):
            assert _numbers(events[kind], "id").tolist() == list(range(1_000, 1_000 + events[kind].num_rows))

    def test_times_follow_the_rate(self, events: Events) -> None:
        """Event n is n / rate seconds after the first, in whole milliseconds."""
        slow = Generator(seed=1, rate=100).events(100)

        assert _numbers(slow["bids"], "date_time").tolist()[:2] == [
            1_436_918_400_040_000,
            1_436_918_400_050_000,
        ]
        assert text_of(int(_numbers(events["persons"], "date_time")[-1])) == "2015-07-15 00:00:01.995"
        assert not np.any(np.diff(_numbers(events["bids"], "date_time")) < 0)

    def test_out_of_order_shuffles_events_within_groups(self) -> None:
        orderly, shuffled = (
            Generator(rate=1_000).events(1_000),
            Generator(rate=1_000, out_of_order=10).events(1_000),
        )
        times = _numbers(shuffled["bids"], "date_time")

        assert sorted(times.tolist()) == _numbers(orderly["bids"], "date_time").tolist()
        assert -9_000 <= np.min(np.diff(times)) < 0
        assert np.max(np.maximum.accumulate(times) - times) <= 9_000

    def test_invalid_group_size_and_rate_are_refused(self) -> None:
        """A group must be a part of a block."""
        with pytest.raises(ValueError, match="divides"):
            Generator(out_of_order=7)
        with pytest.raises(ValueError, match="more than none"):
            Generator(rate=0)

    def test_prices_are_log_uniform(self, events: Events) -> None:
        """A sixth of them lies in each power of ten from 100 on."""
        prices = _numbers(events["bids"], "price")
        shares = np.histogram(np.log10(prices), bins=6, range=(2, 8))[0] / len(prices)

        assert 100 <= prices.min() < prices.max() <= 100_000_000
        assert np.all(np.abs(shares - 1 / 6) < 0.02)

    def test_half_of_the_bids_go_to_the_hot_auction(self, events: Events) -> None:
        """The hot auction is the first of the current hundred; others are among the last 100 and the next
        ten.
        """
        auctions, times = (_numbers(events["bids"], name) for name in ("auction", "date_time"))
        opened = np.searchsorted(_numbers(events["auctions"], "date_time"), times, side="right")
        newest = 999 + opened
        hot = newest // 100 * 100
        is_hot = (auctions == hot) | (auctions == np.maximum(hot - 100, 1_000))

        assert 0.49 < np.mean(is_hot) < 0.54
        assert np.all(auctions[~is_hot] <= newest[~is_hot] + 10)
        assert np.all(auctions[~is_hot] >= np.maximum(newest[~is_hot] - 103, 1_000))

    @pytest.mark.parametrize(
        ("kind", "column", "remainder"), [("bids", "bidder", 1), ("auctions", "seller", 0)]
    )
    def test_three_quarters_of_bids_and_auctions_have_hot_people(
        self, events: Events, kind: str, column: str, remainder: int
    ) -> None:
        """The hot bidder is the second of the current hundred people, the hot seller the first."""
        people = _numbers(events[kind], column)
        share = np.mean(people % 100 == remainder)

        assert 0.72 < share < 0.80
        assert people.max() <= 999 + events["persons"].num_rows + 10

    def test_auctions_last_at_most_twice_as_long_as_a_hundred_openings(self, events: Events) -> None:
        lengths = _numbers(events["auctions"], "expires") - _numbers(events["auctions"], "date_time")

        assert lengths.min() >= 1_000
        assert lengths.max() <= 2 * 167_000
        assert np.all(_numbers(events["auctions"], "reserve") > _numbers(events["auctions"], "initial_bid"))

    def test_half_of_the_bids_use_hot_channels(self, events: Events) -> None:
        """Each hot channel has one url; nine in ten other urls contain the channel's number."""
        bids = events["bids"]
        is_hot = pc.is_in(bids["channel"], pa.array(HOT_CHANNELS))
        urls = bids.filter(is_hot)["url"]
        others = bids.filter(pc.invert(is_hot))["url"]

        assert abs(pc.mean(is_hot.cast(pa.float64())).as_py() - 0.5) < 0.02
        assert len(pc.unique(urls)) == 4
        assert abs(pc.mean(pc.match_substring(others, "channel_id=").cast(pa.float64())).as_py() - 0.9) < 0.02

    def test_events_have_nexmarks_average_sizes(self, events: Events) -> None:
        """People, auctions and bids are 200, 500 and 100 bytes; a number counts eight, channel and url
        nothing.
        """
        for kind, size in zip(KINDS, (200, 500, 100), strict=True):
            names = [name for name in events[kind].column_names if not name.endswith("_key")]
            columns = [events[kind][name] for name in names if name not in {"channel", "url"}]
            texts = [column for column in columns if pa.types.is_string(column.type)]
            text_bytes = sum(pc.mean(pc.binary_length(column)).as_py() for column in texts)
            assert abs(text_bytes + 8 * (len(columns) - len(texts)) - size) < 0.1 * size, kind


class TestArithmetic:
    def test_prices_in_euro_are_exact(self) -> None:
        """0.908 times a price has three decimals."""
        assert [in_euro(price) for price in (1, 1_000, 99_999_999)] == ["0.908", "908.000", "90799999.092"]

    def test_running_mean_is_over_a_sale_and_ten_before(self) -> None:
        """Sales are ordered by time."""
        sales = [
            {"seller": 1, "auction": index, "date_time": index, "price": index}
            for index in reversed(range(13))
        ]

        assert [row["avg"] for row in running_means(sales)][:2] == [0.0, 0.5]
        assert [row["avg"] for row in running_means(sales)][-1] == sum(range(2, 13)) / 11

    def test_average_of_counts_is_rounded_down(self) -> None:
        """The average of 5 and 2 bids is 3; a retracted count does not matter."""
        combine = AtLeastAverage()
        counts = [{"auction": name, "bid_count": count} for name, count in (("a", 5), ("b", 2), ("c", 9))]
        full = combine.add_all(combine.create(), counts)
        rest = combine.uncombine(full, counts[2])

        assert combine.extract(rest) == [{"auction": "a", "bid_count": 5}]
        assert combine.extract(combine.create()) == []

    @pytest.mark.parametrize("combine", [BidStatistics(), PriceStatistics(), Highest("price")])
    def test_merged_statistics_equal_the_whole(self, combine: Any) -> None:
        bids = load_events(DATA)["bids"].to_pylist()
        parts = [
            combine.add_all(combine.create(), bids[start : start + 7]) for start in range(0, len(bids), 7)
        ]
        whole = combine.add_all(combine.create(), bids)

        assert combine.extract(combine.merge(parts)) == combine.extract(whole)


class TestCommand:
    def test_command_without_a_query_lists_all(self) -> None:
        shown = CliRunner().invoke(main, [], env={"COLUMNS": "200"})

        assert shown.exit_code == 0
        assert all(query.title in shown.output for query in QUERIES.values())

    def test_missing_events_are_named_with_a_way_out(self, tmp_path: Path) -> None:
        shown = CliRunner().invoke(main, ["--query", "q0", "--check", str(tmp_path)], env={"COLUMNS": "400"})

        assert shown.exit_code == 2
        assert "person.jsonl" in shown.output
        assert "--generate" in shown.output

    def test_unknown_query_is_refused_with_the_known_ones(self) -> None:
        shown = CliRunner().invoke(main, ["--query", "q99"], env={"COLUMNS": "200"})

        assert shown.exit_code == 2
        assert "q106" in shown.output

    def test_wrong_answer_exits_with_1_and_shows_the_differences(self, tmp_path: Path) -> None:
        shutil.copytree(DATA, tmp_path / "data")
        answers = json.loads(gzip.decompress((DATA / ANSWERS).read_bytes()))
        answers["q2"]["rows"][0][1] += 1
        (tmp_path / "data" / ANSWERS).write_bytes(gzip.compress(json.dumps(answers).encode()))
        arguments = ["--query", "q2", "--check", str(tmp_path / "data"), "--output", str(tmp_path / "out")]
        shown = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})

        assert shown.exit_code == 1
        assert f"missing 1 x {tuple(answers['q2']['rows'][0])}" in shown.output

    def test_query_runs_on_the_examples_own_events_by_default(self, tmp_path: Path) -> None:
        arguments = ["--query", "q2", "--output", str(tmp_path)]
        shown = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})

        assert shown.exit_code == 0, shown.output
        assert "1,840 events" in shown.output

    def test_generate_runs_a_query_on_generated_events(self, tmp_path: Path) -> None:
        arguments = ["--query", "q0", "--generate", "500", "--seed", "4", "--output", str(tmp_path)]
        shown = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})

        assert shown.exit_code == 0, shown.output
        assert read_answer(QUERIES["q0"], tmp_path).total() == 460
        assert "460 events" in shown.output


def test_differences_include_missing_and_additional_rows() -> None:
    expected = Counter({(1007, 242): 2})

    assert differences(expected, expected) == []
    assert differences(Counter({(1, 2): 1}), expected) == ["missing 2 x (1007, 242)", "too much 1 x (1, 2)"]
