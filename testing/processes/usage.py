"""
Resources of a process over time (memory, threads, descriptors), and whether they grow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

__all__ = ["Usage", "slope_per_hour", "usage_of"]

_SAMPLES_MIN: Final = 10
_PAGE_MIB: Final = os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """
    Resources of a process at one moment.

    Attributes:
        memory_mib: resident memory.
        threads: number of threads.
        descriptors: number of open files and sockets.
    """

    memory_mib: float
    threads: int
    descriptors: int


def usage_of(process: int) -> Usage:
    """
    The resources of a process of this machine, from ``/proc``.

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


def slope_per_hour(samples: Sequence[tuple[float, float]], *, warm_up_s: float) -> float | None:
    """
    The growth of a quantity per hour, by least squares over (seconds, quantity), after a warm-up.

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
