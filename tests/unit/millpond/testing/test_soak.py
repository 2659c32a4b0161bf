"""Soaks that continue a report."""

from __future__ import annotations

from pathlib import Path

import orjson

from millpond.testing.faults.report import FaultReport
from millpond.testing.fixtures.determinism import ManualClock, SeededRng
from millpond.testing.soak import Soak


def test_second_soak_adds_to_report(tmp_path: Path) -> None:
    before = FaultReport()
    before.fault("R1", 7, kills=7)
    file = tmp_path / "report.json"
    file.write_bytes(orjson.dumps({"runs": 3, "minutes": 2.5, **before.to_json()}))
    clock, rng = ManualClock(), SeededRng(1)
    soak = Soak(tmp_path, file, minutes=0.0, clock=clock, rng=rng, say=str)
    clock.advance_ms(30_000)
    soak.write()

    report = orjson.loads(file.read_bytes())
    assert (report["runs"], report["minutes"], report["kills"]) == (3, 3.0, 7)
    assert report["faults"]["R1"]["trials"] == 7
    assert set(report) > {"violations", "recovery_p99_s", "takeover_p99_s", "memory_slope_mib_per_hour"}
