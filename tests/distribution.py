"""Distribution of tests over processes: module by module, the longest first, and few processes with a Spark session.

A Spark session costs ten seconds of a processor and a gigabyte, and its tests wait for half of their time.
So one process has a session, or two of at least three processes. They run the modules with users of the
session first, then any others. Tests of such a module without the session go to any process, as do shares of
a test's generated examples.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SPARK: Final = "spark"
"""The group of the tests that use a Spark session, and how the scopes of that group begin."""

_PROCESSES_WITH_TWO_SESSIONS: Final = 3
LONGEST: Final = (
    "tests/conformance/test_import_checkpoint.py",
    "tests/conformance/test_transform_with_state.py",
    "tests/fault/test_demo_kills.py",
    "tests/simulation/test_simulation.py",
    "tests/test_pages.py",
    "tests/transcripts/test_transcripts.py",
    "tests/fault/test_processes.py",
    "tests/unit/millpond/cli/test_help.py",
    "tests/fault/test_spark_cluster.py",
    "tests/test_planted.py",
    "tests/fault/test_s3_faults.py",
    "tests/fault/test_flips_and_cuts.py",
    "tests/property/test_interleavings.py",
    "tests/conformance/test_table_readers.py",
    "tests/conformance/test_daily.py",
    "tests/conformance/test_backfill.py",
    "tests/conformance/test_changes.py",
)
"""Modules that take longest, in this order: one that began last would keep a process when the others have ended."""

_SHARE: Final = re.compile(r"\[share \d+\]$")
_SESSIONS: Final = frozenset({"spark", "spark_as_reader", "rocksdb"})
_ASKS: Final = re.compile(r'\b(?:spark|spark_as_reader|rocksdb): SparkSession\b|getfixturevalue\("spark"\)')
_BY_NAME: Final = "getfixturevalue"


class Distribution(LoadFileScheduling):  # type: ignore[misc] - xdist.scheduler has no types
    """Assigns each process the next group of tests when it has nearly finished its last."""

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._root = config.rootpath
        self._with_session: set[WorkerController] = set()

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(group_of(self._root, nodeid), nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        self._with_session.discard(node)
        crashed: str | None = super().remove_node(node)
        return crashed

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next_for(node)
        if scope is None:
            # Leave the rest, which needs a session: enough processes have one.
            node.shutdown()
            return
        if scope.startswith(SPARK):
            self._with_session.add(node)
        self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def _next_for(self, node: WorkerController) -> str | None:
        """Return the scope that a process takes next: with a session, its users before all others."""
        sessions_max = sessions_of(self.numnodes)
        may_have_one = node in self._with_session or len(self._with_session) < sessions_max
        with_session = [scope for scope in self.workqueue if scope.startswith(SPARK)]
        if with_session and may_have_one:
            return with_session[0]
        return next((scope for scope in self.workqueue if not scope.startswith(SPARK)), None)


def sessions_of(processes: int) -> int:
    """Return the number of processes with a Spark session."""
    return 1 if processes < _PROCESSES_WITH_TWO_SESSIONS else 2


def scope_of(group: str, nodeid: str) -> str:
    """Return a process's unit of work: a group, or of `SPARK` the users of a session in one module."""
    return f"{SPARK} {nodeid.partition('::')[0]}" if group == SPARK else group


def rank_of(item: pytest.Item) -> tuple[int, int]:
    """Return a key that sorts tests by the duration of their scope, the longest first."""
    module = item.nodeid.partition("::")[0]
    is_long = item.get_closest_marker("fault") or item.get_closest_marker("slow")
    return (LONGEST.index(module) if module in LONGEST else len(LONGEST), 0 if is_long else 1)


@functools.cache
def group_of(root: Path, nodeid: str) -> str:
    """Return the group of a test: its module, `SPARK` for users of the Spark session, or a share by itself.

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
    """The users of the session in a module, by node id.

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
                # A class's fixture serves all of its tests, inherited ones too.
                always.add(path if name.startswith("test") else owner)
            elif _BY_NAME in asked_for:
                by_case.add(path)
    return _Users(frozenset(always - {""}), frozenset(by_case))


def _functions_of(scope: ast.Module | ast.ClassDef) -> Mapping[str, ast.FunctionDef]:
    return {each.name: each for each in scope.body if isinstance(each, ast.FunctionDef)}


def _asked_for(name: str, functions: Mapping[str, ast.FunctionDef]) -> set[str]:
    """Return the fixtures requested by a function, and by those fixtures in turn."""
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
