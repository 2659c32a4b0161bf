"""The windowed sum on Millpond's local runner, while compactions, checkpoints and garbage are left to later."""

from __future__ import annotations

from benchmarks.peers.contract import answer_tasks
from benchmarks.peers.millpond_windows import run_without_upkeep

if __name__ == "__main__":
    answer_tasks(run_without_upkeep)
