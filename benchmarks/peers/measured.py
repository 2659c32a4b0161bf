"""Runs of the engines, each in a process of its own, with every pane compared."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers.contract import Task, answers_in, arguments_of
from benchmarks.peers.engines import WARM_UPS, Engine, Part
from benchmarks.peers.environments import UnavailableError, last_line, python_of
from benchmarks.peers.loads import Load, difference, write_load

_ROOT: Final = Path(__file__).resolve().parent.parent.parent
_TIMEOUT_S: Final = 900


@dataclass(frozen=True, slots=True)
class Input:
    """The files of a load, and its panes."""

    folder: Path
    load: Load
    panes: pa.Table


def measure(
    part: Part,
    engines: Sequence[Engine],
    environments: Path,
    on_progress: Callable[[str], None],
    loads: Sequence[Load],
    ids: Sequence[bool] = (False, True),
) -> list[dict[str, Any]]:
    """Run engines over the same files, one after the other, and return a figure for each load, without and with ids.

    Args:
        part: chooses the warm-up.
        engines: the engines of the part.
        environments: the folder of the environments.
        on_progress: is called with the name of each engine before it runs.
        loads: the measured loads.
        ids: whether to measure without ids, with ids, or both.
    """
    figures = []
    with tempfile.TemporaryDirectory(prefix="millpond-peers-") as name:
        inputs = _Inputs(Path(name))
        for engine in engines:
            on_progress(engine.title)
            chosen = [inputs.of(WARM_UPS[part]), *(inputs.of(engine.load_of(load)) for load in loads)]
            figures += _figures_of(engine, chosen, Path(name) / engine.name, environments, ids)
    return figures


class _Inputs:
    """The inputs written so far, by their loads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[Load, Input] = {}

    def of(self, load: Load) -> Input:
        if load not in self._written:
            folder = self._folder / f"input{len(self._written)}"
            self._written[load] = Input(folder, load, write_load(folder, load))
        return self._written[load]


def _figures_of(
    engine: Engine, inputs: Sequence[Input], work: Path, environments: Path, ids: Sequence[bool]
) -> list[dict[str, Any]]:
    runs = [(chosen, with_ids) for chosen in inputs for with_ids in ids if engine.has_ids or not with_ids]
    if not runs:
        return []
    tasks = [
        _task(work / str(number), chosen, with_ids=with_ids) for number, (chosen, with_ids) in enumerate(runs)
    ]
    try:
        seconds: Sequence[float | str] = _seconds_of(engine, tasks, environments)
    except UnavailableError as error:
        seconds = [str(error)] * len(tasks)
    figures = []
    # The first input warms up, and may have the load of a later one.
    warm_ups = sum(engine.has_ids or not with_ids for with_ids in ids)
    for (chosen, with_ids), task, outcome in list(zip(runs, tasks, seconds, strict=True))[warm_ups:]:
        figure: dict[str, Any] = {
            "engine": engine.name,
            "part": engine.part,
            "batch": chosen.load.batch,
            "records": chosen.load.records,
            "with_ids": with_ids,
        }
        figures.append(figure | _outcome(outcome, chosen, Path(task.panes)))
    return figures


def _outcome(outcome: float | str, chosen: Input, panes: Path) -> dict[str, Any]:
    """Return the seconds and the rate of a run, or the reason why it has none."""
    if isinstance(outcome, str):
        return {"reason": outcome}
    reason = difference(pq.read_table(panes), chosen.panes)
    if reason is not None:
        return {"reason": f"wrong panes: {reason}"}
    rate = round(chosen.load.records / outcome)
    return {"panes": chosen.panes.num_rows, "cpu_s": round(outcome, 3), "records_per_cpu_second": rate}


def _task(folder: Path, chosen: Input, *, with_ids: bool) -> Task:
    work = folder / "work"
    work.mkdir(parents=True)
    return Task(
        inputs=str(chosen.folder), work=str(work), panes=str(folder / "panes.parquet"), with_ids=with_ids
    )


def _seconds_of(engine: Engine, tasks: list[Task], environments: Path) -> list[float]:
    python = sys.executable
    if engine.environment is not None:
        python = str(python_of(engine.environment, environments))
    command = [python, "-m", f"benchmarks.peers.{engine.module}", *arguments_of(tasks)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"took longer than {_TIMEOUT_S} s") from None
    seconds = answers_in(done.stdout)
    if done.returncode != 0 or len(seconds) != len(tasks):
        raise UnavailableError(f"ended with code {done.returncode}: {last_line(done.stderr)}")
    return seconds
