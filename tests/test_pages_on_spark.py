"""The tutorial and the how-to pages that use Spark do what they show, in programs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import Document, pages_to_run
from tests.page_run import PageRun

pytestmark = pytest.mark.slow

# What these show is tested in tests/conformance; the pages as they stand, by `make test-spark`.
_RUN_WITH_ALL = {"docs/spark.md", "docs/how-to/move-a-query.md"}

ON_SPARK = [
    pytest.param(page, marks=pytest.mark.spark_all if page.name in _RUN_WITH_ALL else (), id=page.name)
    for page in pages_to_run()
    if page.uses_spark
]


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ON_SPARK)
def test_page_does_what_it_shows_on_spark(page: Document, tmp_path: Path) -> None:
    """Every block of the page runs, Spark's included, and prints what the page says."""
    PageRun(page, tmp_path).run()
