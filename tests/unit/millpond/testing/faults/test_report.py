"""The fault report."""

from __future__ import annotations

import pytest

from millpond.testing.faults.report import FaultReport, quantile


def busy() -> FaultReport:
    report = FaultReport()
    report.fault("R1", 3, kills=3, takeovers=2)
    report.violation("a record is missing")
    for duration_ms in (100.0, 900.0, 200.0):
        report.recovered("R6", duration_ms)
    return report


def test_reports_are_added() -> None:
    report = busy()
    report.add(busy())
    fields = report.to_json()

    assert fields["faults"]["R1"]["trials"] == report.trials("R1") == 6
    assert (fields["kills"], report.number("takeovers")) == (6, 4)
    assert fields["violations"] == ["a record is missing"] * 2
    assert (fields["recovery_p50_s"], fields["takeover_p99_s"]) == (0.2, 0.9)
    assert report.recovery_s(0.5, "R9") is None


def test_report_round_trips_through_file() -> None:
    report = FaultReport.from_json(busy().to_json())

    assert report.to_json() == busy().to_json()
    assert any("3 of 200" in line for line in report.lines())


def test_unknown_name_is_refused() -> None:
    """A misspelled count would be missed."""
    with pytest.raises(KeyError):
        FaultReport().fault("R99")
    with pytest.raises(KeyError):
        FaultReport().count(kill=1)
    assert not FaultReport()


def test_highest_quantile_is_greatest_value() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
