"""Alarms after an hour of silence in ten real series: 428, on both runners."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from examples.shared_data import shared_data
from examples.silence.job import read_alarms, run_local, run_spark
from examples.silence.mentions import load_mentions, load_published, rows_of, silences
from millpond.statestore.store import Store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

Alarms = list[tuple[str, datetime]]

PUBLISHED = shared_data("nab_realTweets")
SOURCES = {"own": load_mentions} | (
    {"published": lambda: load_published(PUBLISHED)} if PUBLISHED.is_dir() else {}
)
PIECES = int(os.environ.get("MILLPOND_SILENCE_PIECES", "60"))
"""In how many pieces the stream comes, where it is not said."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return rows_of(load_mentions())


@pytest.fixture(scope="module")
def expected() -> Alarms:
    """Return the alarms by sorting and scanning each series."""
    return silences(load_mentions())


@pytest.mark.parametrize("source", SOURCES)
def test_real_series_have_428_silences(source: str) -> None:
    """There are 418 pauses of an hour, and ten series that end."""
    mentions = SOURCES[source]()

    assert (sum(map(len, mentions.values())), len(mentions), len(silences(mentions))) == (127_959, 10, 428)
    assert mentions == load_mentions()


@pytest.mark.parametrize("pieces", [None, PIECES, 100])
def test_local_runner_finds_all_silences(
    rows: list[dict[str, Any]], expected: Alarms, tmp_path: Path, pieces: int | None
) -> None:
    with Store.in_memory() as store:
        summary = run_local(rows, store, tmp_path / "alarms", pieces)

    assert read_alarms(tmp_path / "alarms") == expected
    assert (summary.run.timers, summary.run.late, summary.run.dead_letters) == (428, 0, 0)


def test_disorder_within_the_bound_changes_nothing(
    rows: list[dict[str, Any]], expected: Alarms, tmp_path: Path
) -> None:
    """Mentions arrive up to half an hour late."""
    delays = np.random.default_rng(1).integers(0, 1_800, len(rows)).tolist()
    arrives_at = [row["at"] + timedelta(seconds=delay) for row, delay in zip(rows, delays, strict=True)]
    disordered = [rows[index] for index in np.argsort(arrives_at).tolist()]

    with Store.in_memory() as store:
        summary = run_local(disordered, store, tmp_path / "alarms", 40, disorder="30m")

    counts = summary.totals.by_computation["silences"]
    assert read_alarms(tmp_path / "alarms") == expected
    assert counts["waited"] == counts["resumed"] > 1_000


def test_unsorted_bounded_run_misses_most_silences(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """A bundle's records run before the timers that they overtake."""
    with Store.in_memory() as store:
        run_local(rows, store, tmp_path / "alarms", time_sorted=False)

    assert len(read_alarms(tmp_path / "alarms")) == 10


@pytest.mark.parametrize("pieces", [None, 12])
def test_spark_finds_all_silences(
    rows: list[dict[str, Any]], expected: Alarms, tmp_path: Path, spark: SparkSession, pieces: int | None
) -> None:
    run_spark(rows, tmp_path / "pond", tmp_path / "alarms", spark, pieces)

    assert read_alarms(tmp_path / "alarms") == expected


@pytest.mark.spark_all
@pytest.mark.parametrize("pieces", [60, 100])
def test_spark_finds_all_silences_in_small_pieces(
    rows: list[dict[str, Any]], expected: Alarms, tmp_path: Path, spark: SparkSession, pieces: int
) -> None:
    run_spark(rows, tmp_path / "pond", tmp_path / "alarms", spark, pieces)

    assert read_alarms(tmp_path / "alarms") == expected
