"""Instants in every form that users write."""

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
    def test_datetimes_with_a_zone_become_microseconds(self):
        """The zone counts, and so does the last microsecond."""
        moment = datetime(1970, 1, 1, 1, 0, 0, 3, tzinfo=timezone(timedelta(hours=1)))

        assert instant_us(moment) == 3

    def test_a_datetime_without_a_zone_is_refused(self):
        """Millpond does not guess a time zone."""
        with pytest.raises(InvalidError, match="no time zone"):
            instant_us(datetime(2013, 2, 8))  # noqa: DTZ001

    @pytest.mark.parametrize("value", [INSTANT_MIN_US - 1, INSTANT_MAX_US + 1, True, 1.0, "now", None])
    def test_other_values_are_refused(self, value):
        """Times outside the years 1 to 9999, and values of other types, are refused."""
        with pytest.raises(InvalidError):
            instant_us(value)

    def test_the_bounds_themselves_are_times(self):
        """The first and the last instant are accepted, and are what their names say."""
        assert instant_us(INSTANT_MIN_US) == INSTANT_MIN_US
        assert instant_us(datetime.max.replace(tzinfo=UTC)) == INSTANT_MAX_US

    @pytest.mark.parametrize(
        "text", ["1970-01-01T00:00:01Z", "1970-01-01 02:00:01+02:00", " 1970-01-01T00:00:01+00:00 "]
    )
    def test_iso_text_with_a_zone_is_read(self, text):
        """ISO text with any zone gives the same instant."""
        assert parse_instant_us(text) == 1_000_000

    @pytest.mark.parametrize("text", ["1970-01-01T00:00:01", "1970-01-01 00:00:01", "1970-01-01T00:00:01.0"])
    def test_no_time_without_a_zone_is_guessed(self, text):
        """Text and a `datetime` without a zone are both refused, unless the injector names the zone."""
        naive = datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001
        utc, east = (TimeReading.of(None, zone, stream="s") for zone in ("UTC", "+02:00"))
        for time in (text, naive):
            with pytest.raises(InvalidError, match=r'no time zone.*at_zone="UTC"'):
                parse_instant_us(time)
            assert parse_instant_us(time, utc) == 1_000_000
            assert parse_instant_us(time, east) == 1_000_000 - 7_200_000_000

    @pytest.mark.parametrize("value", [None, "", "yesterday", "1970-13-01", "25:00", 1.5])
    def test_unreadable_times_are_refused(self, value):
        """Null, unparsable text and values of other types are refused."""
        with pytest.raises(InvalidError):
            parse_instant_us(value)


class TestColumn:
    @pytest.mark.parametrize(
        ("unit", "ticks"), [("s", 1), ("ms", 1_000), ("us", 1_000_000), ("ns", 1_000_000_000)]
    )
    def test_timestamps_of_every_unit_are_read(self, unit, ticks):
        """A second is a million microseconds in every unit; nanoseconds are rounded down."""
        column = pa.array([ticks, -ticks], pa.timestamp(unit, tz="Europe/Oslo"))

        read = instant_column_us(column, "at")

        assert read.at.tolist() == [1_000_000, -1_000_000]
        assert not read.errors

    def test_nanoseconds_before_1970_are_rounded_down(self):
        """A nanosecond before 1970 lies in the microsecond before it."""
        read = instant_column_us(pa.array([-1, 1], pa.timestamp("ns", tz="UTC")), "at")

        assert read.at.tolist() == [-1, 0]

    def test_integers_are_microseconds(self):
        """Integer columns of any width are microseconds, chunked or not."""
        column = pa.chunked_array([pa.array([1, 2], pa.int32()), pa.array([3], pa.int32())])

        assert instant_column_us(column, "at").at.tolist() == [1, 2, 3]

    def test_a_column_without_a_zone_needs_one_from_the_injector(self):
        """A column of timestamps follows the rule of text and of a `datetime`."""
        east = TimeReading.of(None, "+02:00", stream="s")
        column = pa.array([7_201_000_000], pa.timestamp("us"))

        assert instant_column_us(column, "at", east).at.tolist() == [1_000_000]

    @pytest.mark.parametrize(
        ("unit", "number"), [("s", 1_700_000_000), ("ms", 1_700_000_000_000), ("ns", 17 * 10**17)]
    )
    def test_numbers_in_a_unit_that_is_said(self, unit, number):
        """Rows and columns read the same instant of a number in any unit."""
        reading = TimeReading.of(unit, None, stream="s")

        assert parse_instant_us(number, reading) == 1_700_000_000_000_000
        assert instant_column_us(pa.array([number]), "at", reading).at.tolist() == [1_700_000_000_000_000]

    def test_milliseconds_do_not_pass_for_microseconds(self):
        """Without a unit a number that is a date in milliseconds is refused, in rows and in columns."""
        number = 1_700_000_000_000
        microseconds = TimeReading.of("us", None, stream="s")
        with pytest.raises(InvalidError, match=r'date in milliseconds: say at_unit="ms"') as refused:
            parse_instant_us(number, DEFAULT_READING)

        assert instant_column_us(pa.array([5, number]), "at", DEFAULT_READING).errors == {
            1: str(refused.value)
        }
        assert parse_instant_us(number, microseconds) == number
        assert not instant_column_us(pa.array([number]), "at", microseconds).errors

    @pytest.mark.parametrize(("unit", "zone"), [("m", None), (None, "Europe/Oslo"), (None, "+2")])
    def test_units_and_zones_that_do_not_exist(self, unit, zone):
        """A unit that is none, and a zone whose clock is put back, are refused at the call."""
        with pytest.raises(InvalidError, match=r"at_unit must be|at_zone must be"):
            TimeReading.of(unit, zone, stream="s")

    def test_bad_cells_are_named_and_the_others_are_kept(self):
        """Nulls, unreadable text and times out of range are errors of their own row only."""
        text = instant_column_us(pa.array(["1970-01-01T00:00:01Z", None, "x"]), "at")
        numbers = instant_column_us(pa.array([5, None, 2**62]), "at")
        seconds = instant_column_us(pa.array([5, 2**60], pa.timestamp("s", tz="UTC")), "at")
        unsigned = instant_column_us(pa.array([5, 2**63 + 5], pa.uint64()), "at")

        assert (text.at[0], sorted(text.errors)) == (1_000_000, [1, 2])
        assert (numbers.at[0], sorted(numbers.errors)) == (5, [1, 2])
        assert (seconds.at[0], sorted(seconds.errors)) == (5_000_000, [1])
        assert (unsigned.at[0], sorted(unsigned.errors)) == (5, [1])

    def test_a_column_of_nulls_has_only_errors(self):
        """A column without a type is a column of nulls."""
        assert sorted(instant_column_us(pa.nulls(2), "at").errors) == [0, 1]

    @pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.float64(), pa.date32()])
    def test_a_column_that_can_hold_no_time_is_refused_by_name(self, kind):
        """A column without a zone, or of another type, is a mistake in the call."""
        with pytest.raises(InvalidError, match="column=`at`"):
            instant_column_us(pa.nulls(1, kind), "at")
