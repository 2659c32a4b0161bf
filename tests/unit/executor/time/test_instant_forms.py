"""Forms of instants that users write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pyarrow as pa
import pytest

from millpond.executor.time.instants import (
    DEFAULT_READING,
    INSTANT_MAX_US,
    INSTANT_MIN_US,
    TimeReading,
    instant_column_us,
    instant_us,
    parse_instant_us,
)
from millpond.statestore.errors import InvalidError


class TestInstant:
    def test_datetime_with_a_zone_becomes_microseconds(self):
        moment = datetime(1970, 1, 1, 1, 0, 0, 3, tzinfo=timezone(timedelta(hours=1)))

        assert instant_us(moment) == 3

    def test_datetime_without_a_zone_is_refused(self):
        """Millpond does not guess a time zone."""
        with pytest.raises(InvalidError, match="no time zone"):
            instant_us(datetime(2013, 2, 8))  # noqa: DTZ001

    @pytest.mark.parametrize("value", [INSTANT_MIN_US - 1, INSTANT_MAX_US + 1, True, 1.0, "now", None])
    def test_times_out_of_range_and_other_types_are_refused(self, value):
        with pytest.raises(InvalidError):
            instant_us(value)

    def test_first_and_last_instant_are_accepted(self):
        assert instant_us(INSTANT_MIN_US) == INSTANT_MIN_US
        assert instant_us(datetime.max.replace(tzinfo=UTC)) == INSTANT_MAX_US

    @pytest.mark.parametrize(
        "text",
        [
            "1970-01-01T00:00:01Z",
            "1970-01-01 02:00:01+02:00",
            " 1970-01-01T00:00:01+00:00 ",
            "1970-01-01t00:00:01z",
        ],
    )
    def test_iso_text_with_any_zone_is_read(self, text):
        assert parse_instant_us(text) == 1_000_000

    @pytest.mark.parametrize("text", ["1970-01-01T00:00:01", "1970-01-01 00:00:01", "1970-01-01T00:00:01.0"])
    def test_time_without_a_zone_needs_at_zone(self, text):
        """Text and datetimes follow the same rule."""
        naive = datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001
        utc, east = (TimeReading.of(None, zone, stream="s") for zone in ("UTC", "+02:00"))
        for time in (text, naive):
            with pytest.raises(InvalidError, match=r'no time zone.*at_zone="UTC"'):
                parse_instant_us(time)
            assert parse_instant_us(time, utc) == 1_000_000
            assert parse_instant_us(time, east) == 1_000_000 - 7_200_000_000

    @pytest.mark.parametrize("text", ["1970-01-01T24:00:00Z", "1970-01-01t24:00z"])
    def test_hour_24_is_refused_with_the_other_way_to_write_it(self, text):
        with pytest.raises(InvalidError, match="write 24:00 as 00:00 of the next day"):
            parse_instant_us(text)

    @pytest.mark.parametrize("value", [None, "", "yesterday", "1970-13-01", "25:00", b"7"])
    def test_unreadable_times_are_refused(self, value):
        with pytest.raises(InvalidError):
            parse_instant_us(value)


class TestColumn:
    @pytest.mark.parametrize(
        ("unit", "ticks"), [("s", 1), ("ms", 1_000), ("us", 1_000_000), ("ns", 1_000_000_000)]
    )
    def test_timestamps_of_every_unit_are_read(self, unit, ticks):
        """Nanoseconds are rounded down."""
        column = pa.array([ticks, -ticks], pa.timestamp(unit, tz="Europe/Oslo"))

        read = instant_column_us(column, "at")

        assert read.at.tolist() == [1_000_000, -1_000_000]
        assert not read.errors

    def test_nanoseconds_before_1970_are_rounded_down(self):
        """Division that truncates would move the time forward."""
        read = instant_column_us(pa.array([-1, 1], pa.timestamp("ns", tz="UTC")), "at")

        assert read.at.tolist() == [-1, 0]

    def test_integer_columns_are_microseconds(self):
        column = pa.chunked_array([pa.array([1, 2], pa.int32()), pa.array([3], pa.int32())])

        assert instant_column_us(column, "at").at.tolist() == [1, 2, 3]

    def test_timestamp_column_without_a_zone_takes_the_injectors(self):
        """Text and datetimes follow the same rule."""
        east = TimeReading.of(None, "+02:00", stream="s")
        column = pa.array([7_201_000_000], pa.timestamp("us"))

        assert instant_column_us(column, "at", east).at.tolist() == [1_000_000]

    @pytest.mark.parametrize(
        ("unit", "number"), [("s", 1_700_000_000), ("ms", 1_700_000_000_000), ("ns", 17 * 10**17)]
    )
    def test_numbers_are_read_in_the_declared_unit(self, unit, number):
        reading = TimeReading.of(unit, None, stream="s")

        assert parse_instant_us(number, reading) == 1_700_000_000_000_000
        assert instant_column_us(pa.array([number]), "at", reading).at.tolist() == [1_700_000_000_000_000]

    def test_milliseconds_without_a_unit_are_refused(self):
        """A recent date in milliseconds would be a day of 1970 in microseconds."""
        number = 1_700_000_000_000
        microseconds = TimeReading.of("us", None, stream="s")
        with pytest.raises(InvalidError, match=r'date in milliseconds: say at_unit="ms"') as refused:
            parse_instant_us(number, DEFAULT_READING)

        assert instant_column_us(pa.array([5, number]), "at", DEFAULT_READING).errors == {
            1: str(refused.value)
        }
        assert parse_instant_us(number, microseconds) == number
        assert not instant_column_us(pa.array([number]), "at", microseconds).errors

    @pytest.mark.parametrize(("unit", "zone"), [("m", None), (None, "+2")])
    def test_unknown_units_and_zones_are_refused(self, unit, zone):
        with pytest.raises(InvalidError, match=r"at_unit must be|at_zone must be"):
            TimeReading.of(unit, zone, stream="s")

    def test_unreadable_cells_get_errors_and_others_are_kept(self):
        text = instant_column_us(pa.array(["1970-01-01T00:00:01Z", None, "x"]), "at")
        numbers = instant_column_us(pa.array([5, None, 2**62]), "at")
        seconds = instant_column_us(pa.array([5, 2**60], pa.timestamp("s", tz="UTC")), "at")
        unsigned = instant_column_us(pa.array([5, 2**63 + 5], pa.uint64()), "at")

        assert (text.at[0], sorted(text.errors)) == (1_000_000, [1, 2])
        assert (numbers.at[0], sorted(numbers.errors)) == (5, [1, 2])
        assert (seconds.at[0], sorted(seconds.errors)) == (5_000_000, [1])
        assert (unsigned.at[0], sorted(unsigned.errors)) == (5, [1])

    def test_column_of_nulls_has_only_errors(self):
        """Arrow gives such a column the type null."""
        assert sorted(instant_column_us(pa.nulls(2), "at").errors) == [0, 1]

    @pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.bool_(), pa.date32()])
    def test_column_of_another_type_is_refused_by_name(self, kind):
        with pytest.raises(InvalidError, match="column=`at`"):
            instant_column_us(pa.nulls(1, kind), "at")


class TestUnits:
    @pytest.mark.parametrize(
        ("value", "unit"),
        [
            (1_767_225_600_000, "ms"),
            (1_767_225_600_000_000_000, "ns"),
            (1_767_225_600.25, "s"),
            (1_767_225_600_000.5, "ms"),
        ],
    )
    def test_date_in_another_unit_is_told_with_that_unit(self, value, unit):
        with pytest.raises(InvalidError, match=f'say at_unit="{unit}"'):
            parse_instant_us(value, DEFAULT_READING)
        if isinstance(value, int):
            assert (
                f'say at_unit="{unit}"'
                in instant_column_us(pa.array([value, 1]), "t", DEFAULT_READING).errors[0]
            )
        else:
            with pytest.raises(InvalidError, match=f'say at_unit="{unit}"'):
                instant_column_us(pa.array([value]), "t", DEFAULT_READING)

    @pytest.mark.parametrize(
        ("value", "unit", "micros"),
        [
            (1_767_225_600.25, "s", 1_767_225_600_250_000),
            (1_767_225_600.1, "s", 1_767_225_600_100_000),
            (-0.000_001_5, "s", -2),
            (1_767_225_600_000.5, "ms", 1_767_225_600_000_500),
            (7.5, "us", 8),
            (1_500.0, "ns", 2),
        ],
    )
    def test_float_of_a_declared_unit_is_rounded_to_microseconds(self, value, unit, micros):
        reading = TimeReading.of(unit, None, stream="s")

        assert parse_instant_us(value, reading) == micros
        assert instant_column_us(pa.array([value]), "t", reading).at.tolist() == [micros]

    def test_float_that_is_no_time_is_unreadable(self):
        reading = TimeReading.of("s", None, stream="s")
        column = pa.array([float("nan"), float("inf"), -1e300, None, 1.0])
        read = instant_column_us(column, "t", reading)

        assert sorted(read.errors) == [0, 1, 2, 3]
        assert read.at[4] == 1_000_000
        for value in (float("nan"), float("-inf"), 1e300):
            with pytest.raises(InvalidError):
                parse_instant_us(value, reading)


OSLO = [
    ("2026-01-01T12:00:00", "2026-01-01T11:00:00Z"),
    ("2026-07-01T12:00:00", "2026-07-01T10:00:00Z"),
    ("2026-03-29T01:59:59.999999", "2026-03-29T00:59:59.999999Z"),
    ("2026-03-29T02:30:00", "2026-03-29T01:30:00Z"),
    ("2026-03-29T03:00:00", "2026-03-29T01:00:00Z"),
    ("2026-10-25T02:30:00", "2026-10-25T00:30:00Z"),
    ("2026-10-25T03:00:00", "2026-10-25T02:00:00Z"),
]  # fmt: skip


class TestZones:
    """An hour that comes twice is the first; one that never comes is as long after the change as without it."""

    @pytest.mark.parametrize(("local", "instant"), OSLO)
    def test_named_zone_has_the_offset_of_the_day(self, local, instant):
        reading = TimeReading.of(None, "Europe/Oslo", stream="s")
        naive, micros = datetime.fromisoformat(local), parse_instant_us(instant)

        assert parse_instant_us(local, reading) == micros
        assert parse_instant_us(naive, reading) == micros
        assert instant_column_us(pa.array([naive], pa.timestamp("us")), "t", reading).at.tolist() == [micros]
        assert instant_column_us(pa.array([local]), "t", reading).at.tolist() == [micros]

    def test_columns_agree_with_single_times_where_offsets_changed_at_odd_seconds(self):
        reading = TimeReading.of(None, "Europe/Amsterdam", stream="s")
        starts = [datetime(1892, 4, 30, 23, 50), datetime(1937, 6, 30, 23, 50), datetime(1, 1, 2)]  # noqa: DTZ001
        times = [start + timedelta(seconds=seconds) for start in starts for seconds in range(0, 2_400, 7)]

        read = instant_column_us(pa.array(times, pa.timestamp("us")), "t", reading)
        assert read.at.tolist() == [parse_instant_us(time, reading) for time in times]

    def test_zone_of_the_time_itself_counts(self):
        reading = TimeReading.of(None, "Europe/Oslo", stream="s")

        assert parse_instant_us("2026-07-01T12:00:00 UTC", reading) == parse_instant_us(
            "2026-07-01T12:00:00Z"
        )

    @pytest.mark.parametrize("zone", ["Europe/Osla", "../../etc/passwd", "", "+2:00", "\x00", 7])
    def test_unknown_zone_is_refused_with_the_nearest_name(self, zone):
        with pytest.raises(InvalidError, match="a zone such as Europe/Oslo") as refused:
            TimeReading.of(None, zone, stream="s")
        assert ("did you mean 'Europe/Oslo'" in str(refused.value)) == (zone == "Europe/Osla")
