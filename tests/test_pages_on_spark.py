"""
The tutorial and the how-to pages that use Spark do what they show, in programs of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import Document, pages_to_run
from tests.page_run import PageRun

ON_SPARK = [page for page in pages_to_run() if page.uses_spark]


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ON_SPARK, ids=lambda page: page.name)
def test_page_does_what_it_shows_on_spark(page: Document, tmp_path: Path) -> None:
    """
    Every block of the page runs, Spark's included, and prints what the page says.
    """
    PageRun(page, tmp_path).run()
