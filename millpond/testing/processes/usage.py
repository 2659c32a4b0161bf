"""Resources of a process over time (memory, threads, descriptors), and whether they grow."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from millpond.statestore.types import Clock

_SAMPLES_MIN: Final = 10
_PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources of a process at one moment.

    Attributes:
        memory_mib: resident memory.
        threads: number of threads.
        descriptors: number of open files and sockets.
    """

    memory_mib: float
    threads: int
    descriptors: int


def usage_of(process: int) -> Usage:
    """The resources of a process of this machine, from ``/proc``.

    Args:
        process: the process id.

    Raises:
        OSError: there is no such process.
    """
    folder = Path("/proc") / str(process)
    pages = int((folder / "statm").read_text(encoding="utf-8").split()[1])
    return Usage(
        memory_mib=pages * _PAGE_MIB,
        threads=len(list((folder / "task").iterdir())),
        descriptors=len(list((folder / "fd").iterdir())),
    )


class UsageSampler:
    """Samples the resources of a process at even intervals, in a thread, until it is closed or the process ends.

    An allocator returns memory by fits and starts: samples that are few, or taken at the ends of other work, make
    a slope of where they happen to lie.

    Args:
        usage: the resources now; an `OSError` means that the process has ended.
        clock: the source of time.
        every_ms: pause between two samples.
    """

    def __init__(self, usage: Callable[[], Usage], clock: Clock, every_ms: int) -> None:
        self._usage, self._clock, self._every_ms = usage, clock, every_ms
        self._samples: list[tuple[float, Usage]] = []
        self._started_us = clock.monotonic_us()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_ms / 1_000):
            try:
                usage = self._usage()
            except OSError:
                return
            self._samples.append(((self._clock.monotonic_us() - self._started_us) / 1e6, usage))

    @property
    def samples(self) -> Sequence[tuple[float, Usage]]:
        """What was sampled so far: seconds since the start, and the resources then."""
        return tuple(self._samples)


def slope_per_hour(samples: Sequence[tuple[float, float]], *, warm_up_s: float) -> float | None:
    """The growth of a quantity per hour, by least squares over (seconds, quantity), after a warm-up.

    Returns:
        The slope; ``None`` for too few samples.

    Example:
        >>> slope_per_hour([(60.0 * minute, 100.0 + minute) for minute in range(1, 31)], warm_up_s=60.0)
        60.0
    """
    warm = [sample for sample in samples if sample[0] >= warm_up_s]
    if len(warm) < _SAMPLES_MIN:
        return None
    seconds, quantities = zip(*warm, strict=True)
    return round(float(np.polyfit(seconds, quantities, 1)[0]) * 3_600, 2)
