"""The tutorial and the how-to pages with Spark, run as a reader would."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documents import Document, pages_to_run
from tests.page_run import PageRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

# tests/conformance covers their contents; `make test-spark` runs the pages themselves.
_RUN_WITH_ALL = {"docs/spark.md", "docs/how-to/move-a-query.md"}
# Starting Spark costs more than all the programs of these pages.
_SHARE_A_SESSION = {"docs/how-to/daily.md", "docs/how-to/embed-in-foreach-batch.md"}
_ON_SPARK = [page for page in pages_to_run() if page.uses_spark]


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.spark_all if page.name in _RUN_WITH_ALL else (), id=page.name)
        for page in _ON_SPARK
        if page.name not in _SHARE_A_SESSION
    ],
)
def test_page_does_what_it_shows_in_processes_of_its_own(page: Document, tmp_path: Path) -> None:
    PageRun(page, tmp_path).run()


@pytest.mark.parametrize(
    "page", [page for page in _ON_SPARK if page.name in _SHARE_A_SESSION], ids=lambda page: page.name
)
def test_page_does_what_it_shows_in_the_session_of_the_tests(
    page: Document, tmp_path: Path, spark: SparkSession
) -> None:
    PageRun(page, tmp_path, spark).run()
