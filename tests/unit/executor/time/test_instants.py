"""Times as users write them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

from millpond.executor.time.instants import to_micros
from millpond.statestore.errors import InvalidError


def test_an_integer_is_microseconds() -> None:
    """Integers are taken as they are, numpy's included."""
    assert [to_micros(5), to_micros(np.int64(-7))] == [5, -7]


def test_a_datetime_is_the_same_instant_whatever_its_offset() -> None:
    """Two spellings of one instant give one number, exact to the microsecond."""
    instant = datetime(2013, 2, 8, 12, 0, 0, 1, tzinfo=UTC)
    elsewhere = instant.astimezone(timezone(timedelta(hours=-5)))

    assert 1_360_324_800_000_001 == to_micros(instant) == to_micros(elsewhere)


@pytest.mark.parametrize("moment", [datetime(2013, 2, 8), True, 1.5, "2013-02-08", None, 2**63])  # noqa: DTZ001
def test_what_is_no_instant_is_refused(moment: Any) -> None:
    """A naive datetime, a flag, a fraction, text and numbers beyond 64 bits are refused."""
    with pytest.raises(InvalidError):
        to_micros(moment)
