"""The fixture of the tests in the table of mistakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mistakes.catalogue import Told, documented


@pytest.fixture
def told(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    """Compare the messages of a test with its row in the table."""
    (mark,) = request.node.iter_markers("mistake")
    rows = {row.name: row for row in documented()}
    assert mark.args[0] in rows, f"docs/errors.md has no row {mark.args[0]}"
    expected = Told(rows[mark.args[0]], caplog)
    yield expected
    assert expected.has_told, "the test compares nothing with the page"
