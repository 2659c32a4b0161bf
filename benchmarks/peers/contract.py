"""What the benchmark asks of an engine's module, and what the module answers; it needs nothing but PyArrow.

The module is run by an interpreter that may lack Millpond and everything of its environment.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

WINDOW_US: Final = 600_000_000
END_KEY: Final = "end"
"""Key of the record that ends all windows."""

_ANSWER: Final = "answer: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A run of an engine.

    Attributes:
        inputs: the folder with the files of the load.
        work: an empty folder for whatever the engine writes.
        panes: the file for the panes: Parquet with ``key``, ``start`` in microseconds, and ``total``.
        with_ids: whether records whose id has come before are to be dropped.
    """

    inputs: str
    work: str
    panes: str
    with_ids: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The processor seconds of a run, and its panes as Parquet."""

    seconds: float
    panes: pa.Table


def answer_tasks(run: Callable[[Task], Answer]) -> None:
    """Run the tasks of the command line one after the other, and print the processor seconds of each."""
    for text in sys.argv[1:]:
        task = Task(**json.loads(text))
        answer = run(task)
        pq.write_table(answer.panes, task.panes)
        print(f"{_ANSWER}{answer.seconds}", flush=True)


def arguments_of(tasks: list[Task]) -> list[str]:
    """Return the tasks as arguments of an engine's module."""
    return [json.dumps(asdict(task)) for task in tasks]


def answers_in(output: str) -> list[float]:
    """Return the processor seconds that an engine's module has printed."""
    return [float(line.removeprefix(_ANSWER)) for line in output.splitlines() if line.startswith(_ANSWER)]


def batches_of(task: Task) -> list[pa.Table]:
    """Return the batches of a load, without ids if the task does not need them."""
    columns = ["key", "at", "value", *(["id"] if task.with_ids else [])]
    return [pq.read_table(path, columns=columns) for path in sorted(Path(task.inputs).glob("*.parquet"))]


def used_seconds() -> float:
    """Return the processor seconds so far of this process and of its ended children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
