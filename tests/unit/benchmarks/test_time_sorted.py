"""The benchmark of time-sorted records."""

from __future__ import annotations

import pytest

from benchmarks.time_sorted import FORMS, run_once


@pytest.mark.parametrize("form", FORMS)
def test_number_of_waiting_records_follows_the_form(form: str) -> None:
    """In order, only the last record of each piece waits."""
    waited = run_once(form, records=400, keys=3, pieces=4)["waited"]

    is_sorted, disorder_s, is_foreseen = FORMS[form]
    if not is_sorted:
        assert waited == 0
    elif not is_foreseen:
        assert waited == 400
    else:
        assert waited == 4 if not disorder_s else waited > 4
