"""The benchmark of records in the order of time measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.time_sorted import FORMS, run_once


@pytest.mark.parametrize("form", FORMS)
def test_records_wait_where_the_form_says_so(form: str) -> None:
    """As they come none waits, in order only the last of each piece, out of order some, and unforeseen all."""
    waited = run_once(form, records=400, keys=3, pieces=4)["waited"]

    is_sorted, disorder_s, is_foreseen = FORMS[form]
    if not is_sorted:
        assert waited == 0
    elif not is_foreseen:
        assert waited == 400
    else:
        assert waited == 4 if not disorder_s else waited > 4
