"""The repository's own rules, each with planted violations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests import tidy
from tests.tidy import Finding, Source

Rule = Callable[[Source], Iterator[Finding]]


@lru_cache(maxsize=1)
def _sources() -> tuple[Source, ...]:
    return tuple(tidy.repository_sources())


@lru_cache(maxsize=1)
def _findings() -> dict[str, list[str]]:
    # Run file by file, so that each is parsed once.
    found: dict[str, list[str]] = {rule.__name__: [] for rule in tidy.RULES}
    for source in _sources():
        for rule in tidy.RULES:
            found[rule.__name__] += map(str, rule(source))
    return found


@pytest.mark.parametrize("rule", tidy.RULES, ids=lambda rule: rule.__name__)
def test_repository_keeps_the_rule(rule: Rule) -> None:
    findings = _findings()[rule.__name__]

    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize("rule", tidy.WHOLE_RULES, ids=lambda rule: rule.__name__)
def test_repository_as_a_whole_keeps_the_rule(rule: Callable[[Iterable[Source]], Iterator[Finding]]) -> None:
    assert [str(finding) for finding in rule(_sources())] == []


def test_circle_of_type_checking_imports_is_found() -> None:
    guarded = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from millpond.executor.interval.b import B"
    )
    one = Source("executor/interval/a.py", guarded)
    other = Source("executor/interval/b.py", "from millpond.executor.interval import a")

    assert [str(finding) for finding in tidy.circles([one, other])] != []
    assert list(tidy.circles([one, Source("executor/interval/b.py", "x = 1")])) == []


def test_all_files_are_checked() -> None:
    """Each is a source once: rooms, tests, documents and the files at the root."""
    paths = [source.path for source in _sources()]

    assert len(set(paths)) == len(paths)
    assert {"statestore/errors.py", "tests/tidy.py", "pyproject.toml", "Makefile", "README.md"} <= set(paths)
    assert not [path for path in paths if path.startswith("millpond/statestore/")]


@pytest.mark.parametrize("room", tidy.LINKED)
def test_each_room_is_linked_into_the_import_root(room: str) -> None:
    """A relative link lets a clone work in any place."""
    link = tidy.ROOT / "millpond" / room

    assert link.readlink() == Path("..") / room


PLANTED: list[tuple[Rule, str, str]] = [
    (tidy.banned_modules, "executor/x.py", "import time"),
    (tidy.banned_modules, "executor/x.py", "import time as clock"),
    (tidy.banned_modules, "executor/x.py", "from time import sleep"),
    (tidy.banned_modules, "tests/unit/test_x.py", "def f():\n    import random"),
    (tidy.banned_modules, "statestore/x.py", "import uuid\nuuid.uuid4()"),
    (tidy.banned_modules, "statestore/x.py", "import numpy as np\nnp.random"),
    (tidy.banned_modules, "statestore/x.py", "from datetime import datetime\ndatetime.now()"),
    (tidy.banned_modules, "statestore/x.py", "import datetime as dt\nlater = dt.datetime.now"),
    (tidy.banned_modules, "statestore/x.py", "from threading import Timer"),
    (tidy.banned_modules, "statestore/x.py", "import threading\nthreading.Timer(1, print)"),
    (tidy.arrows_point_down, "statestore/x.py", "from millpond.executor.computation.timers import Timer"),
    (tidy.arrows_point_down, "executor/x.py", "import millpond.cli.main"),
    (tidy.arrows_point_down, "executor/x.py", "from millpond.testing import models"),
    (tidy.arrows_point_down, "gc/x.py", "import millpond as mp"),
    (tidy.arrows_point_down, "gc/x.py", "from millpond import Store"),
    (tidy.arrows_point_down, "gc/x.py", "from statestore.errors import DataError"),
    (tidy.arrows_point_down, "gc/x.py", "from . import compaction"),
    (
        tidy.sub_room_arrows_point_down,
        "executor/time/x.py",
        "from millpond.executor.interval.bundle import Bundle",
    ),
    (
        tidy.sub_room_arrows_point_down,
        "executor/local/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from millpond.executor.spark.run import SparkRun",
    ),
    (tidy.sub_room_arrows_point_down, "executor/sinks/x.py", "from millpond.executor import superstep"),
    (tidy.sub_room_arrows_point_down, "statestore/log/x.py", "from millpond.statestore.store import Store"),
    (tidy.sub_room_arrows_point_down, "statestore/x.py", "import millpond.statestore.log.log"),
    (tidy.sub_room_arrows_point_down, "statestore/attic/x.py", "x = 1"),
    (
        tidy.sub_room_arrows_point_down,
        "executor/time/x.py",
        "from millpond.executor.windows.pipeline import Pipeline",
    ),
    (tidy.swallowed_errors, "millpond/cli/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (tidy.swallowed_errors, "millpond/cli/x.py", "try:\n    f()\nexcept:\n    '''Never mind.'''"),
    (tidy.swallowed_errors, "millpond/cli/x.py", "try:\n    f()\nexcept (OSError, Exception):\n    ..."),
    (
        tidy.swallowed_errors,
        "millpond/cli/x.py",
        "import contextlib\nwith contextlib.suppress(Exception):\n    f()",
    ),
    (tidy.unbounded_memory, "executor/x.py", "import functools\n@functools.cache\ndef f(x): ..."),
    (tidy.unbounded_memory, "executor/x.py", "from queue import Queue\nq = Queue()"),
    (tidy.unbounded_memory, "executor/x.py", "import queue\nq = queue.SimpleQueue()"),
    (tidy.long_document_lines, "docs/x.md", "a word " * 20),
    (tidy.long_document_lines, "README.md", "```\n" + "x" * (tidy.DOCUMENT_LINE_MAX + 1) + "\n```"),
    (tidy.long_document_lines, "docs/x.md", "see " + "https://x.org/" + "x" * tidy.DOCUMENT_LINE_MAX),
    (tidy.leftovers, "docs/x.md", "a list\n- FIX" + "ME\n"),
    (tidy.leftovers, "Makefile", "# TO" + "DO: tidy up"),
    (tidy.ragged_lines, "docs/x.md", "a line \nanother\n"),
    (tidy.ragged_lines, "docs/x.md", "a line\r\n"),
    (tidy.ragged_lines, "Makefile", "no line feed"),
    (tidy.ragged_lines, "Makefile", "one too many\n\n"),
    (tidy.skips, "tests/unit/test_x.py", "import pytest\npytest.skip('no data')"),
    (tidy.skips, "tests/unit/test_x.py", "from pytest import mark\n@mark.skipif(True)\ndef f(): ..."),
    (tidy.bytes_that_run, "executor/x.py", "import pickle\npickle.loads(column)"),
    (tidy.bytes_that_run, "executor/x.py", "from cloudpickle import loads\nloads(column)"),
    (tidy.bytes_that_run, "executor/x.py", "import numpy as np\nnp.load(path)"),
    (tidy.bytes_that_run, "millpond/cli/x.py", "eval(text)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), PLANTED)
def test_planted_violation_is_found(rule: Rule, path: str, text: str) -> None:
    findings = list(rule(Source(path, text)))

    assert len({finding.line for finding in findings}) == 1
    assert str(findings[0]).startswith(f"{path}:")


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(tidy.RULES)


ALLOWED: list[tuple[Rule, str, str]] = [
    (tidy.banned_modules, "statestore/system.py", "import time"),
    (tidy.banned_modules, "executor/x.py", "import timeit_like\nfrom millpond.statestore import system"),
    (tidy.banned_modules, "executor/x.py", "from datetime import datetime\ndatetime.fromtimestamp(0)"),
    (tidy.banned_modules, "benchmarks/x.py", "import numpy as np\nnp.random.default_rng(1)"),
    (tidy.arrows_point_down, "executor/x.py", "import gc\nfrom millpond.gc.compaction import Compaction"),
    (tidy.arrows_point_down, "statestore/x.py", "from millpond.migrations import upgrade"),
    (tidy.arrows_point_down, "millpond/cli/x.py", "import millpond as mp"),
    (tidy.arrows_point_down, "tests/unit/test_x.py", "import millpond as mp"),
    (
        tidy.sub_room_arrows_point_down,
        "executor/local/x.py",
        "from millpond.executor.time.clocks import Clocks\nfrom millpond.statestore.store import Store",
    ),
    (tidy.sub_room_arrows_point_down, "statestore/store.py", "from millpond.statestore.catalog import pins"),
    (tidy.swallowed_errors, "millpond/cli/x.py", "try:\n    f()\nexcept Exception as e:\n    log(e)"),
    (tidy.swallowed_errors, "millpond/cli/x.py", "try:\n    f()\nexcept OSError:\n    pass"),
    (tidy.unbounded_memory, "executor/x.py", "import functools\n@functools.cache\ndef f(): ..."),
    (tidy.unbounded_memory, "executor/x.py", "from queue import Queue\nq = Queue(maxsize=1)"),
    (tidy.ragged_lines, "Makefile", "all:\n\techo\n\n\techo again\n"),
    (tidy.ragged_lines, "Makefile", ""),
    (tidy.long_document_lines, "docs/x.md", "é" * tidy.DOCUMENT_LINE_MAX),
    (tidy.long_document_lines, "docs/x.md", "| " + "a cell | " * 20),
    (tidy.long_document_lines, "docs/x.md", "https://x.org/" + "x" * tidy.DOCUMENT_LINE_MAX),
    (tidy.long_document_lines, "executor/x.py", "#" * 200),
    (
        tidy.skips,
        "tests/conformance/test_leases.py",
        "import pytest\npytest.skip('no Docker engine answers')",
    ),
    (tidy.bytes_that_run, "executor/x.py", "import pickle\npickle.loads(answer)  # our child's"),
    (tidy.bytes_that_run, "executor/x.py", "import json\njson.loads(column)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_allowed_code_passes(rule: Rule, path: str, text: str) -> None:
    """It resembles a violation."""
    assert list(rule(Source(path, text))) == []
