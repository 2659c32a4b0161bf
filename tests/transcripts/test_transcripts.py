"""
Every transcript of this folder, on the runners.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millpond.testing.transcript_runs import LocalTranscriptRun, SparkTranscriptRun
from millpond.testing.transcripts import failure_of, read_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOLDER = Path(__file__).parent
_ON_SPARK = (
    "early_counts_start_over_after_each_firing",
    "late_by_the_clock",
    "merging_sessions_retract_what_each_of_them_had_shown",
    "an_explicit_restart_changes_nothing",
    "percentile_watermarks_outlive_a_restart",
    "the_patents_percentile_tiers_then_hourly_updates_for_two_days",
    "the_patents_repeated_hash_join_with_a_timeout",
    "the_patents_global_count_daily_at_eight",
)
"""Documents that touch every feature; `--runner spark` runs them all."""


def _documents() -> Iterator[Any]:
    for path in sorted(_FOLDER.glob("*.yaml")):
        for document in read_documents([path]):
            yield pytest.param(document, id=f"{path.stem}:{document['name']}")


_DOCUMENTS = tuple(_documents())


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_on_the_local_runner(document: Any) -> None:
    """
    The panes are those of the transcript, or it is refused as it says.
    """
    assert failure_of(document, LocalTranscriptRun) is None


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_with_restarts_between_all_steps(document: Any) -> None:
    """
    Stopping and starting the runner between all steps changes no pane.
    """
    assert failure_of(document, LocalTranscriptRun, restart=True) is None


@pytest.mark.parametrize("name", _ON_SPARK)
def test_on_the_spark_runner(name: str, spark: SparkSession) -> None:
    """
    The Spark runner shows the same panes.
    """
    (document,) = (one.values[0] for one in _DOCUMENTS if one.values[0]["name"] == name)

    assert failure_of(document, lambda strategy: SparkTranscriptRun(strategy, spark)) is None


def test_there_are_enough_of_them() -> None:
    """
    There are at least a hundred transcripts, and at least eight must be refused.
    """
    documents = list(read_documents(sorted(_FOLDER.glob("*.yaml"))))

    assert len(documents) >= 100
    assert sum("error" in document for document in documents) >= 8
