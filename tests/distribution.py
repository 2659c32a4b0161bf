"""
Distribution of tests over processes: module by module, with all users of the run's Spark session in one process.

A Spark session costs seconds and a gigabyte, so only one process has it. Tests that start programs with a Spark of
their own are as free as all others. Shares of a test's generated examples go to any process.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

__all__ = ["Distribution", "group_of"]

_SHARE: Final = re.compile(r"\[share \d+\]$")
_ASKS_FOR_SPARK: Final = re.compile(r'\bspark(?:_as_reader)?: SparkSession\b|getfixturevalue\("spark"\)')


class Distribution(LoadFileScheduling):  # type: ignore[misc] - xdist.scheduler has no types
    """
    Assigns each process the next group of tests when it has nearly finished its last.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        return group_of(self._root, nodeid)


def group_of(root: Path, nodeid: str) -> str:
    """
    The group of a test: its module, or ``spark`` for modules with a test in the run's Spark session; a share by itself.

    Args:
        root: the folder that node ids are relative to.
        nodeid: the test's node id.
    """
    if _SHARE.search(nodeid):
        return nodeid
    module = nodeid.partition("::")[0]
    return "spark" if _is_on_spark(root / module) else module


@functools.cache
def _is_on_spark(module: Path) -> bool:
    return _ASKS_FOR_SPARK.search(module.read_text(encoding="utf-8")) is not None
