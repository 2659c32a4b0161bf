"""Zeitgeist on flights, compared with a plain computation."""

from __future__ import annotations

import hashlib
import json
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import millpond as mp
from examples.zeitgeist import oracle
from examples.zeitgeist.computations import PATIENCE_MINUTES, Detector
from examples.zeitgeist.data import arrivals, load_flights, prepare_input
from examples.zeitgeist.hours import end_of, hour_of, local_hour, next_day, start_of
from examples.zeitgeist.job import zeitgeist
from examples.zeitgeist.normal import MEASURES, expectation, first_step_above, learned
from examples.zeitgeist.questions import late_flights
from examples.zeitgeist.results import days_of, read_results
from examples.zeitgeist.what_if import WhatIf, version_before

pytestmark = pytest.mark.slow

FIRST, LAST = date(2013, 1, 20), date(2013, 2, 10)


@pytest.fixture(scope="module")
def year() -> pd.DataFrame:
    return arrivals(load_flights())


@pytest.fixture(scope="module")
def weeks() -> pd.DataFrame:
    """Load three weeks up to the blizzard."""
    return arrivals(load_flights(), FIRST, LAST)


@pytest.fixture(scope="module")
def answer_of_year(year: pd.DataFrame) -> oracle.Answer:
    return oracle.compute(year)


@pytest.fixture(scope="module")
def answer_of_weeks(weeks: pd.DataFrame) -> oracle.Answer:
    return oracle.compute(weeks)


def _rows(flights: pd.DataFrame) -> list[dict[str, Any]]:
    delay = flights["delay_minutes"].astype(object).where(flights["delay_minutes"].notna(), None)
    rows: list[dict[str, Any]] = flights.assign(delay_minutes=delay).to_dict("records")
    return rows


def _run(
    rows: list[dict[str, Any]],
    size: int,
    folder: Path,
    *,
    sensitivity: float = 1,
    store: mp.Store | None = None,
) -> oracle.Answer:
    """Return the job's answer with its stream in pieces of ``size``."""
    store = store or mp.Store.in_memory()
    pipeline = zeitgeist(folder, Detector(sensitivity))
    with mp.LocalRunner(store, progress=False).start(pipeline, stepping=True) as run:
        for start in range(0, len(rows), size):
            run.inject("flights", rows[start : start + size])
            run.step()
        run.finish("flights")
        run.run_until_quiet()
    return read_results(folder).answer(late_flights(store))


def test_stream_has_every_flight_of_the_year_once(year: pd.DataFrame) -> None:
    """8,255 of the flights were cancelled."""
    assert len(year) == 336_776
    assert year["id"].is_unique
    assert year["delay_minutes"].isna().sum() == 8_255


def test_stream_is_ordered_by_report_and_disordered_in_event_time(year: pd.DataFrame) -> None:
    """More than half of the flights follow another that was scheduled later."""
    reported = year["scheduled"] + pd.to_timedelta(year["delay_minutes"].fillna(0), unit="m")
    disorder = year["scheduled"].cummax() - year["scheduled"]
    assert reported.is_monotonic_increasing
    assert (disorder > pd.Timedelta(0)).mean() > 0.5


def test_disorder_bound_covers_every_counted_flight(year: pd.DataFrame) -> None:
    """The counter itself ignores the other 610."""
    disorder = year["scheduled"].cummax() - year["scheduled"]
    counted = ~(year["delay_minutes"] > PATIENCE_MINUTES).fillna(value=False).astype(bool)
    policy = zeitgeist(Path("out")).check().injectors["flights"].watermark
    assert isinstance(policy, mp.BoundedDisorder)
    bound_us = policy.bound_us
    assert disorder[counted].max() <= pd.Timedelta(bound_us, unit="us")
    assert (~counted).sum() == 610


def test_prepared_input_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    """Spark reads files in the order of their modification times."""
    folders = [prepare_input(tmp_path / name, flights_per_file=1_000, first=LAST, last=LAST) for name in "ab"]
    first, second = (sorted(folder.glob("*.parquet")) for folder in folders)
    assert [_digest(path) for path in first] == [_digest(path) for path in second]
    assert [path.stat().st_mtime for path in first] == sorted(path.stat().st_mtime for path in second)


def test_unfinished_input_is_written_again(tmp_path: Path) -> None:
    """Files of a killed preparation must not enter the stream."""
    (tmp_path / "input.unfinished").mkdir()
    (tmp_path / "input.unfinished" / "flights-0099.parquet").write_bytes(b"half")
    folder = prepare_input(tmp_path / "input", flights_per_file=1_000, first=LAST, last=LAST)
    assert [path.name for path in folder.glob("*.parquet")] == ["flights-0000.parquet"]


def test_input_in_other_pieces_is_refused(tmp_path: Path) -> None:
    prepare_input(tmp_path / "input", flights_per_file=1_000, first=LAST, last=LAST)
    with pytest.raises(SystemExit, match="--fresh"):
        prepare_input(tmp_path / "input", flights_per_file=500, first=LAST, last=LAST)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_names_of_hours_are_utc_and_can_be_parsed() -> None:
    assert hour_of(start_of("2013-02-08T21:00Z") + 1) == "2013-02-08T21:00Z"
    assert hour_of(end_of("2013-02-08T21:00Z")) == "2013-02-08T22:00Z"
    assert local_hour("2013-02-08T21:00Z") == 16


@pytest.mark.parametrize(
    ("hour", "following"),
    [
        ("2013-02-08T21:00Z", "2013-02-09T21:00Z"),
        ("2013-03-09T13:00Z", "2013-03-10T12:00Z"),
        ("2013-11-02T12:00Z", "2013-11-03T13:00Z"),
    ],
)
def test_next_day_is_the_same_hour_in_new_york(hour: str, following: str) -> None:
    """When clocks change, a day has 23 or 25 hours."""
    assert next_day(hour) == following
    assert local_hour(hour) == local_hour(following)


def test_model_learns_at_most_three_deviations_from_a_day() -> None:
    """Otherwise the model would expect another blizzard."""
    measure = MEASURES["cancelled"]
    normal = {"mean": 1.0, "variance": 2.0}
    after = learned(normal, 30, 500, measure)
    assert after["mean"] == pytest.approx(1.0 + 0.1 * 3 * 2**0.5)


def test_deviation_is_at_least_that_of_counting() -> None:
    """After a quiet month a single cancellation must not raise an alert."""
    quiet = expectation({"mean": 0.0, "variance": 0.0}, MEASURES["cancelled"])
    assert quiet.spike_limit() == 6.0


@pytest.mark.parametrize(("limit", "first"), [(0.0, 3), (2.9, 3), (3.0, 6), (7.2, 9)])
def test_first_step_above_a_limit_is_the_next_multiple(limit: float, first: int) -> None:
    assert first_step_above(limit, 3) == first


@pytest.mark.parametrize("size", [997, 6_000, 1_000_000])
def test_answer_equals_the_plain_computation_for_any_batch_size(
    weeks: pd.DataFrame, answer_of_weeks: oracle.Answer, size: int, tmp_path: Path
) -> None:
    assert answer_of_weeks.alerts
    assert oracle.differences(answer_of_weeks, _run(_rows(weeks), size, tmp_path)) == []


def test_more_sensitive_alarm_equals_the_plain_computation(
    weeks: pd.DataFrame, answer_of_weeks: oracle.Answer, tmp_path: Path
) -> None:
    """It finds all alerts of the less sensitive one, and more."""
    answer = oracle.compute(weeks, sensitivity=2)
    found = _run(_rows(weeks), 6_000, tmp_path, sensitivity=2)
    assert oracle.differences(answer, found) == []
    final, final_before = (
        {place for place in alerts if place[-1] == "final"}
        for alerts in (found.alerts, answer_of_weeks.alerts)
    )
    assert final > final_before


def test_replay_starts_at_the_last_version_before_a_complete_day(weeks: pd.DataFrame, tmp_path: Path) -> None:
    store = mp.Store.in_memory()
    _run(_rows(weeks), 1_000, tmp_path, store=store)
    version, day = version_before(store, date(2013, 2, 1)), "2013-02-01T05:00Z"

    def complete(at: int) -> bool:
        states = store.rows_view("window_counter", at).to_arrow().column("state").to_pylist()
        return any(json.loads(state)["next"] > day for state in states)

    assert (complete(version), complete(version + 1)) == (False, True)
    assert version_before(store, date(2012, 1, 1)) < version < version_before(store, date(2014, 1, 1))


def test_result_of_a_replay_survives_a_round_trip(tmp_path: Path) -> None:
    """A finished demo shows it again without another replay."""
    part = mp.types.PartDifference(name="alerts", equal=3, changed=0, added=2, missing=1)
    what_if = WhatIf(version=7, day="2013-01-15", computations=[], tables=[part])
    what_if.write(tmp_path / "what_if.json")
    assert WhatIf.read(tmp_path / "what_if.json") == what_if


def test_repeated_flights_change_nothing(
    weeks: pd.DataFrame, answer_of_weeks: oracle.Answer, tmp_path: Path
) -> None:
    """Each flight is delivered up to three times, near and far apart."""
    rows = _rows(weeks)
    back = (0, 40, 150)
    again = [rows[max(0, index - far)] for index in range(len(rows)) for far in back[: 1 + index % 3]]
    assert len(again) > 1.9 * len(rows)
    assert oracle.differences(answer_of_weeks, _run(again, 3_000, tmp_path)) == []


def test_differences_name_missing_additional_and_wrong_counts() -> None:
    ours = oracle.Answer(counts={("EWR", "a"): {"flights": 1}, ("EWR", "b"): {"flights": 2}}, late=1)
    theirs = oracle.Answer(counts={("EWR", "b"): {"flights": 3}, ("EWR", "c"): {"flights": 2}}, late=2)
    text = " ".join(oracle.differences(ours, theirs))
    assert all(word in text for word in ("late", "'a') is missing", "'c') is too much", "instead of"))


def test_blizzard_has_the_strongest_alerts_of_the_year(answer_of_year: oracle.Answer) -> None:
    """The blizzard was on 8 and 9 February."""
    strength: dict[str, float] = {}
    for (_, hour, _, _, stage), (_, _, deviations) in answer_of_year.alerts.items():
        if stage == "final":
            strength[hour[:10]] = strength.get(hour[:10], 0) + deviations
    assert set(sorted(strength, key=strength.__getitem__)[-2:]) == {"2013-02-08", "2013-02-09"}


def test_days_are_ranked_by_the_strength_of_their_alerts(weeks: pd.DataFrame, tmp_path: Path) -> None:
    _run(_rows(weeks), 5_000, tmp_path)
    days = days_of(read_results(tmp_path))
    assert [f"{day:%m-%d}" for day in days.index[:2]] == ["02-08", "02-09"]
    assert days["cancelled"].tolist()[:2] == [472, 393]


def _days_of_two_airports(
    days: int, silent_from: pd.Timestamp, silent_until: pd.Timestamp
) -> list[dict[str, Any]]:
    """Make three flights an hour by day at two airports, one of which is silent for a while."""
    hours = pd.date_range("2013-05-01", periods=days * 24, freq="h", tz="America/New_York")
    return [
        {
            "id": f"{origin} {hour} {number}",
            "origin": origin,
            "scheduled": (hour + pd.Timedelta(minutes=20 * number)).to_pydatetime(),
            "delay_minutes": 0,
        }
        for hour in hours
        if 6 <= hour.hour < 22
        for origin in ("AAA", "BBB")
        if origin == "BBB" or not silent_from <= hour < silent_until
        for number in range(3)
    ]


def test_silence_raises_an_alert_when_the_watermark_passes_it(tmp_path: Path) -> None:
    """The airport has not been heard of again; its nights raise none."""
    silent = pd.Timestamp("2013-05-20 14:00", tz="America/New_York")
    rows = _days_of_two_airports(20, silent, silent + pd.Timedelta(days=2))
    store = mp.Store.in_memory()
    with mp.LocalRunner(store, progress=False).start(zeitgeist(tmp_path), stepping=True) as run:
        run.inject("flights", rows)
        run.run_until_quiet()

    results = read_results(tmp_path)
    alerts = results.alerts
    raised = [(row.origin, row.local_time, row.kind, row.measure) for row in alerts.itertuples()]
    # The last flight of the day is at 21:40, and others may be reported six hours later.
    assert raised == [("AAA", "2013-05-20 14:00", "dip", "silent")]
    assert len(results.standstills) == 1


def test_silences_of_the_year_are_six_unusual_hours(answer_of_year: oracle.Answer) -> None:
    """The evening of Thanksgiving is silent at two airports, and no night counts."""
    silent = [alert[:2] for alert in answer_of_year.alerts if alert[3] == "silent"]
    assert sorted(silent, key=lambda alert: alert[1]) == [
        ("EWR", "2013-02-03T10:00Z"),
        ("LGA", "2013-03-03T10:00Z"),
        ("LGA", "2013-05-05T09:00Z"),
        ("LGA", "2013-09-01T00:00Z"),
        ("EWR", "2013-11-29T01:00Z"),
        ("LGA", "2013-11-29T02:00Z"),
    ]
