"""The parts of a superstep's time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.anatomy import PARTS, Stopwatch, draw, parts_of
from benchmarks.engine_result import BatchTime

TIME = BatchTime(
    rows_read=10, batch_ms=400.0, parts_ms={"triggerExecution": 400, "addBatch": 320, "walCommit": 20}
)
DIRECT = {
    "batch": 290.0,
    "route": 1.0,
    "where": 9.0,
    "arrow": 90.0,
    "collect": 115.0,
    "homes": 140.0,
    "commit": 2.0,
}
BY_TASKS = {"batch": 290.0, "route": 10.0, "arrow": 240.0, "tasks": 250.0, "commit": 2.0}


@pytest.mark.parametrize("watched", [DIRECT, BY_TASKS, {}], ids=["direct", "by tasks", "unknown"])
def test_parts_are_all_of_the_batch(watched: dict[str, float]) -> None:
    parts = parts_of(TIME, watched)

    assert parts.keys() == PARTS.keys()
    assert sum(parts.values()) == pytest.approx(400)


def test_parts_of_a_superstep_without_tasks() -> None:
    assert parts_of(TIME, DIRECT) == pytest.approx(
        {"log": 80, "call": 30, "plan": 10, "job": 90, "route": 16, "work": 140, "commit": 2, "rest": 32}
    )


def test_parts_of_a_superstep_of_tasks() -> None:
    """The work of Python is a part of the job."""
    assert parts_of(TIME, BY_TASKS) == pytest.approx(
        {"log": 80, "call": 30, "plan": 10, "job": 250, "route": 0, "work": 0, "commit": 2, "rest": 28}
    )


class Engine:
    def consume(self) -> None:
        self.step()
        self.step()

    def step(self) -> None:
        pass


def test_methods_are_timed_batch_by_batch() -> None:
    watch = Stopwatch()
    with watch.watching({"batch": (Engine, "consume"), "step": (Engine, "step")}):
        for _ in range(2):
            Engine().consume()
    Engine().consume()

    assert [batch.keys() for batch in watch.batches] == [{"batch", "step"}] * 2
    assert all(batch["batch"] >= batch["step"] for batch in watch.batches)


def test_picture_has_a_bar_for_each_form(tmp_path: Path) -> None:
    draw({"one": dict.fromkeys(PARTS, 1.0), "two": dict.fromkeys(PARTS, 2.0)}, tmp_path / "anatomy.png")

    assert (tmp_path / "anatomy.png").read_bytes().startswith(b"\x89PNG")
