"""Times that users write."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from millpond.executor.time.instants import to_micros
from millpond.statestore.errors import InvalidError


def test_integers_are_microseconds() -> None:
    assert [to_micros(5), to_micros(np.int64(-7))] == [5, -7]


def test_datetime_with_any_offset_is_exact_to_the_microsecond() -> None:
    instant = datetime(2013, 2, 8, 12, 0, 0, 1, tzinfo=UTC)
    elsewhere = instant.astimezone(timezone(timedelta(hours=-5)))

    assert 1_360_324_800_000_001 == to_micros(instant) == to_micros(elsewhere)


@pytest.mark.parametrize("moment", [datetime(2013, 2, 8), True, 1.5, "2013-02-08", None, 2**63])  # noqa: DTZ001
def test_values_that_are_not_instants_are_refused(moment: Any) -> None:
    with pytest.raises(InvalidError):
        to_micros(moment)
