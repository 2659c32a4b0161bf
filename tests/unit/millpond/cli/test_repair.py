"""``millpond repair`` as a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from millpond.cli import restore
from millpond.cli.main import main
from millpond.executor.computation.computation import Computation
from millpond.executor.inputs.extraction import pieces, rows_from
from millpond.executor.inputs.positions import admit_batch, input_positions
from millpond.executor.local.runner import LocalRunner
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.superstep.plan import InputPosition
from millpond.statestore.errors import InvalidError
from millpond.statestore.store import Store

BATCHES = 4


class Count(Computation):
    def process_record(self, context, record):
        context.state.set((context.state.get() or 0) + 1)


def consume(path: Path, hosts: str, *batches: int) -> None:
    made = EnginePipeline("p")
    made.inject("in", key="k", at="at").apply(Count(), name="count")
    runner = LocalRunner(path, zookeeper=hosts, progress=False, upkeep=None)
    with runner.start(made, stepping=True) as run:
        for batch in batches:
            for _, piece in pieces(rows_from([{"k": "a", "at": batch}]), 1):
                run.consume("in", piece, InputPosition(stream="in", source="q", batch=batch))
        run.run_until_quiet()


def numbers(path: Path, part: str) -> list[int]:
    return sorted(int(entry.name) for entry in (path / "checkpoints" / "in" / part).iterdir())


@pytest.fixture
def damaged(tmp_path: Path, zookeeper_hosts: str) -> Path:
    """A store that lost the rows of its last batch, with the checkpoint of the query that delivered it."""
    path = tmp_path / "pond"
    consume(path, zookeeper_hosts, *range(BATCHES))
    for part in ("commits", "offsets"):
        (path / "checkpoints" / "in" / part).mkdir(parents=True)
        for batch in range(BATCHES):
            (path / "checkpoints" / "in" / part / str(batch)).write_text("v1")
    (path / "checkpoints" / "in" / "metadata").write_text('{"id":"q"}')
    max((path / "rows").glob("computation=count/*.parquet")).unlink()
    return path


class KilledError(BaseException):
    """The process ends here."""


def test_killed_repair_is_completed_by_next_call(
    damaged: Path, zookeeper_hosts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then Spark's query is refused with that advice."""
    given = ["repair", str(damaged), "--zookeeper", zookeeper_hosts]

    def killed(*_: object, dry_run: bool = False, **__: object) -> tuple[str, ...]:
        if not dry_run:
            raise KilledError
        return ()

    with monkeypatch.context() as patched:
        patched.setattr(restore, "rewind_checkpoints", killed)
        with pytest.raises(KilledError):
            CliRunner().invoke(main, [*given, "--yes"], catch_exceptions=False)
    with Store.open(damaged, read_only=True) as store:
        known = input_positions(store.snapshot().txns, "p", "in")
    assert known == {"q": BATCHES - 2}
    with pytest.raises(InvalidError, match="run `millpond repair` again"):
        admit_batch(known, "in", "q", BATCHES)

    planned = CliRunner().invoke(main, [*given, "--dry-run"], catch_exceptions=False)
    assert (planned.exit_code, "is ahead of the store" in planned.output) == (1, True)
    assert numbers(damaged, "commits") == list(range(BATCHES))
    finished = CliRunner().invoke(main, [*given, "--yes"], catch_exceptions=False)
    assert "the earlier repair is finished" in finished.output
    assert numbers(damaged, "commits") == numbers(damaged, "offsets") == list(range(BATCHES - 1))
    again = CliRunner().invoke(main, given, catch_exceptions=False)
    assert (again.exit_code, "nothing to repair" in again.output) == (0, True)

    consume(damaged, zookeeper_hosts, BATCHES - 1)
    with Store.open(damaged, read_only=True) as store:
        assert store.rows_view("count").to_arrow().column("state").to_pylist() == [str(BATCHES)]


def test_unfinished_batch_of_query_is_left_alone(damaged: Path, zookeeper_hosts: str) -> None:
    """Every crash leaves a planned batch."""
    given = ["repair", str(damaged), "--zookeeper", zookeeper_hosts]
    assert CliRunner().invoke(main, [*given, "--yes"], catch_exceptions=False).exit_code == 0
    (damaged / "checkpoints" / "in" / "offsets" / str(BATCHES - 1)).write_text("v1")
    whole = CliRunner().invoke(main, [*given, "--yes"], catch_exceptions=False)
    assert "nothing to repair" in whole.output
    assert numbers(damaged, "offsets") == list(range(BATCHES))
