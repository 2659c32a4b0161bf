"""Resource usage of a process, and its growth."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millpond.statestore.system import SystemClock
from millpond.testing.processes.usage import Usage, UsageSampler, slope_per_hour, usage_of
from millpond.testing.servers.zookeeper import wait_until

GROWS_WHEN_ASKED = """
import os, sys, threading
print("started", flush=True)
sys.stdin.readline()
threading.Thread(target=threading.Event().wait, daemon=True).start()
opened = os.open(os.devnull, os.O_RDONLY)
block = bytearray(b"x") * (64 << 20)
print("grown", flush=True)
sys.stdin.readline()
"""


def test_threads_descriptors_and_written_memory_are_counted() -> None:
    # Measure another process: in this one, remains of earlier tests may end in between, and new memory may be theirs.
    with subprocess.Popen(
        [sys.executable, "-c", GROWS_WHEN_ASKED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        before = usage_of(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "grown\n"
        during = usage_of(process.pid)

    assert (during.threads, during.descriptors) == (before.threads + 1, before.descriptors + 1)
    assert during.memory_mib >= before.memory_mib + 30


def test_ended_process_has_no_usage() -> None:
    with pytest.raises(OSError, match="No such file"):
        usage_of(1 << 30)


def test_samples_end_with_process() -> None:
    usages = [Usage(memory_mib=float(mib), threads=1, descriptors=3) for mib in range(4)]
    left = iter(usages)
    gone: list[bool] = []

    def next_usage() -> Usage:
        for usage in left:
            return usage
        gone.append(True)
        raise ProcessLookupError

    with UsageSampler(next_usage, SystemClock(), every_ms=1) as sampler:
        assert wait_until(lambda: bool(gone), SystemClock(), 10_000)

    seconds = [second for second, _ in sampler.samples]
    assert [usage for _, usage in sampler.samples] == usages
    assert seconds == sorted(seconds)
    assert gone == [True]


def test_slope_ignores_warm_up() -> None:
    """Too few samples have no slope."""
    flat = [(10.0, 50.0), *((60.0 * minute, 100.0) for minute in range(1, 31))]

    assert slope_per_hour(flat, warm_up_s=60.0) == 0.0
    assert slope_per_hour(flat[:5], warm_up_s=60.0) is None
