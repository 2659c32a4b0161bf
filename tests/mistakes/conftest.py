"""The fixture of tests that are rows of the table of mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mistakes.catalogue import Told, documented


@pytest.fixture
def told(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    """Compares what the test is told with the row that the test is marked with."""
    (mark,) = request.node.iter_markers("mistake")
    rows = {row.name: row for row in documented()}
    assert mark.args[0] in rows, f"docs/errors.md has no row {mark.args[0]}"
    expected = Told(rows[mark.args[0]], caplog)
    yield expected
    assert expected.has_told, "the test compares nothing with the page"
