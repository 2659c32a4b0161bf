"""The benchmark of exact sums, with few records."""

from __future__ import annotations

from benchmarks import exact_sums


def test_exact_and_rounding_sums_are_measured_in_each_form() -> None:
    """Forms are the kinds of numbers, of rows and of triggers."""
    combiners = exact_sums.of_the_combiner(count=200, rounds=1)
    runs = exact_sums.of_whole_runs(records=200, rounds=1, keys=20)

    assert len({(one["numbers"], one["at_a_time"]) for one in combiners}) == len(combiners) == 6
    assert [(one["rows"], one["shown"]) for one in runs] == [
        ("dicts", "at the end"),
        ("dicts", "each element"),
        ("Arrow", "at the end"),
        ("Arrow", "each element"),
    ]
    assert all(one["exact_s"] > 0 < one["rounding_s"] for one in runs)
