"""Fingerprints of computations' code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from millpond.executor.pipeline.code_fingerprint import code_fingerprint
from millpond.executor.windows.combiners import CombineFn, Count, Sum
from millpond.executor.windows.pipeline import Pipeline
from millpond.executor.windows.window_fns import FixedWindows
from millpond.statestore.rows.codec import Codec, JsonCodec

CODE = """
import enum
import re
from dataclasses import dataclass, field
from functools import partial

from millpond.executor.computation.computation import Computation

LIMIT = 5
NAMES = frozenset({"a", "b", "c", "d", "e"})

class Kind(enum.Enum):
    LOUD = 1
    QUIET = 2

@dataclass
class Options:
    words: set = field(default_factory=lambda: {"x", "y", "z"})
    kind: Kind = Kind.LOUD

def helper(value):
    return value * 2

class Base(Computation):
    def finish(self, value):
        return value

class Alert(Base):
    pattern = re.compile("a+")

    def __init__(self, at=3):
        self.at = at
        self.options = Options()
        self.scale = partial(helper, value=2)
        self.myself = self

    def process_record(self, context, record):
        # a remark
        if record.value > LIMIT and record.key in {"p", "q", "r"}:
            context.produce("alerts", [self.finish(helper(one)) for one in NAMES])

made = Alert()
"""


def fingerprint(code: str, made: str = "made") -> str:
    module = ModuleType("written")
    sys.modules["written"] = module
    try:
        exec(compile(code, "written.py", "exec", dont_inherit=True), module.__dict__)
        return code_fingerprint(eval(made, module.__dict__))
    finally:
        del sys.modules["written"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value * 2", "value * 3"),
        ("LIMIT = 5", "LIMIT = 6"),
        ('"d", "e"}', '"d", "f"}'),
        ("return value\n", "return -value\n"),
        ("at=3", "at=4"),
        ('"y", "z"', '"y", "w"'),
        ("= Kind.LOUD", "= Kind.QUIET"),
        ("value=2", "value=1"),
        ('"p", "q"', '"p", "o"'),
        ('"alerts"', '"alarms"'),
        ('compile("a+")', 'compile("b+")'),
        ("class Alert(Base)", "class Other(Base):\n    more = 1\n\nclass Alert(Other)"),
    ],
)
def test_changed_code_changes_the_fingerprint(old: str, new: str) -> None:
    """The class, its bases, the names that it uses in its module, and the instance's values all count."""
    assert CODE.count(old) == 1
    assert fingerprint(CODE.replace(old, new)) != fingerprint(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("# a remark", "# another"), ("\n\ndef helper", "\n\n\n\n\ndef helper"), ('"c", "d"', '"d", "c"')],
)
def test_change_without_effect_keeps_the_fingerprint(old: str, new: str) -> None:
    """Comments, line numbers and the written order of a set do not count."""
    assert CODE.count(old) == 1
    assert fingerprint(CODE.replace(old, new)) == fingerprint(CODE)


def test_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Hash seeds, cached bytecode and the module's place do not count."""
    (tmp_path / "written.py").write_text(CODE)
    program = (
        "from millpond.executor.pipeline.code_fingerprint import code_fingerprint;"
        "import written; print(code_fingerprint(written.made))"
    )
    paths = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in (1, 2, 3)
    }
    assert answers == {fingerprint(CODE)}


def test_fingerprint_of_a_windowed_step_includes_its_options() -> None:
    """All windowed steps share a class of the engine."""

    def step(size: str, combiner: CombineFn[Any, Any, Any]) -> str:
        pipeline = Pipeline("p")
        pipeline.inject("s", key="k", at="t").window(FixedWindows(size)).combine(combiner, name="step")
        return code_fingerprint(pipeline.check().computations["step"].computation)

    assert step("1m", Count()) == step("1m", Count())
    assert len({step("1m", Count()), step("2m", Count()), step("1m", Sum())}) == 3


def test_fingerprint_includes_key_extractors() -> None:
    """An extractor decides which records a key gets."""
    assert code_fingerprint(1, [lambda value: value["a"]]) != code_fingerprint(1, [lambda value: value["b"]])
    assert code_fingerprint(1, ["a"]) != code_fingerprint(1, ["b"])


def test_fingerprint_leaves_nothing_on_a_protocol() -> None:
    """Python 3.11 would take an attribute there for a member, and find that no other codec has it."""

    class Mine(Codec):
        name = "mine"
        is_text = True
        encode = decode = staticmethod(str)

    code_fingerprint(Mine())

    assert isinstance(JsonCodec(), Codec)
