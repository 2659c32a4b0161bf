"""Distribution of tests over processes: module by module, with the users of a Spark session in one process.

A Spark session costs seconds and a gigabyte, and its tests wait for half of their time: one process has it, or two
where there are three. The tests of a module that do without it are as free as those that start programs with a
Spark of their own: else the processes with Spark work longer than all others. Shares of a test's generated examples go to any process.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

SPARK: Final = "spark"
"""The group of the tests that use a Spark session."""

_PROCESSES_WITH_TWO_SESSIONS: Final = 3
_SHARE: Final = re.compile(r"\[share \d+\]$")
_SESSIONS: Final = frozenset({"spark", "spark_as_reader"})
_ASKS: Final = re.compile(r'\bspark(?:_as_reader)?: SparkSession\b|getfixturevalue\("spark"\)')
_BY_NAME: Final = "getfixturevalue"


class Distribution(LoadFileScheduling):  # type: ignore[misc] - xdist.scheduler has no types
    """Assigns each process the next group of tests when it has nearly finished its last."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._root = config.rootpath

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(group_of(self._root, nodeid), nodeid, self.numnodes)


def scope_of(group: str, nodeid: str, processes: int) -> str:
    """What one process takes as a whole: a group, or with three processes or more one of two parts of `SPARK`.

    Args:
        group: the test's group.
        nodeid: the test's node id; a module's users of Spark stay together.
        processes: how many there are.
    """
    if group != SPARK or processes < _PROCESSES_WITH_TWO_SESSIONS:
        return group
    module = nodeid.partition("::")[0]
    return f"{SPARK} {crc32(module.encode()) % 2}"


@functools.cache
def group_of(root: Path, nodeid: str) -> str:
    """The group of a test: its module, or `SPARK` if it uses the run's Spark session; a share by itself.

    Args:
        root: the folder that node ids are relative to.
        nodeid: the test's node id.
    """
    if _SHARE.search(nodeid):
        return nodeid
    module, _, test = nodeid.partition("::")
    name, _, case = test.partition("[")
    users = _users_in(root / module)
    is_user = name in users.always or name.rpartition("::")[0] in users.always
    return SPARK if is_user or (name in users.by_case and "spark" in case.lower()) else module


@dataclass(frozen=True, slots=True)
class _Users:
    """Who uses the session in a module, as node ids name them.

    Attributes:
        always: tests, and classes with all of their tests.
        by_case: tests that ask for it in those cases that have it in their name.
    """

    always: frozenset[str]
    by_case: frozenset[str]


@functools.cache
def _users_in(module: Path) -> _Users:
    text = module.read_text(encoding="utf-8")
    tree = ast.parse(text if _ASKS.search(text) else "")
    shared = _functions_of(tree)
    classes = {each.name: _functions_of(each) for each in tree.body if isinstance(each, ast.ClassDef)}
    always: set[str] = set()
    by_case: set[str] = set()
    for owner, own in [("", shared), *classes.items()]:
        for name in own:
            path = f"{owner}::{name}" if owner else name
            asked_for = _asked_for(name, shared | own)
            if asked_for & _SESSIONS:
                # A fixture of a class is there for all of its tests, inherited ones too.
                always.add(path if name.startswith("test") else owner)
            elif _BY_NAME in asked_for:
                by_case.add(path)
    return _Users(frozenset(always - {""}), frozenset(by_case))


def _functions_of(scope: ast.Module | ast.ClassDef) -> Mapping[str, ast.FunctionDef]:
    return {each.name: each for each in scope.body if isinstance(each, ast.FunctionDef)}


def _asked_for(name: str, functions: Mapping[str, ast.FunctionDef]) -> set[str]:
    """The fixtures that a function asks for, and those that they ask for."""
    asked_for: set[str] = set()
    waiting = [name]
    while waiting:
        function = functions.get(waiting.pop())
        if function is not None:
            arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
            waiting.extend(arguments - asked_for)
            asked_for |= arguments
            if any(isinstance(each, ast.Attribute) and each.attr == _BY_NAME for each in ast.walk(function)):
                asked_for.add(_BY_NAME)
    return asked_for
