"""``millpond bench``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from millpond.cli.main import main

SMALL = ("--records", "3000", "--keys", "50", "--seconds", "0.5", "--rate", "200", "--commits", "5")


def test_figures_are_consistent_with_options(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "--folder", str(tmp_path), *SMALL, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    throughput, latency, commits = found["throughput"], found["latency"], found["commits"]

    assert (throughput["records"], throughput["keys"], commits["commits"]) == (3_000, 50, 5)
    assert 0 < latency["records"] <= 100
    assert 0 < latency["p50_ms"] <= latency["p95_ms"] <= latency["p99_ms"]
    assert 0 < commits["commit_p50_ms"] <= min(commits["commit_p99_ms"], commits["superstep_p50_ms"])
    rate = throughput["records"] / throughput["elapsed_ms"] * 1_000
    assert abs(throughput["records_per_second"] - rate) <= rate / 100
    assert found["durability"] == "os_cache"
    assert found["machine"]["processors"] >= 1
    assert list(tmp_path.iterdir()) == []


def test_table_has_every_figure(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", "--folder", str(tmp_path), *SMALL, "--durability", "disk"])

    assert result.exit_code == 0, result.output
    assert "durability disk" in result.stdout.splitlines()[0]
    for figure in ("records per second", "latency, p50", "latency, p99", "commit, p50", "superstep, p50"):
        assert figure in result.stdout
