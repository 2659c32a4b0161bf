"""
Runs transcripts: windows, triggers and time described in YAML, on the real runners.

``python -m millpond.testing.transcripts FILE…`` runs every document of each file and prints a
line for each. The format is that of Apache Beam's trigger transcripts with a few steps and
fields of our own, so cases written there run here unchanged.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
import yaml

from millpond.dataflow.strategy import WindowingStrategy
from millpond.statestore.errors import InvalidError, MillpondError
from millpond.testing.constructors import seconds_us
from millpond.testing.transcript import Step, Transcript, elements_of, marks_of, matches, read_transcript
from millpond.testing.transcript_runs import LocalTranscriptRun, SparkTranscriptRun, TranscriptRun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["TranscriptError", "failure_of", "main", "read_documents", "run_transcript"]

Opener: TypeAlias = Callable[[WindowingStrategy], TranscriptRun]
"""Starts a runner for a windowed step."""


class TranscriptError(Exception):
    """
    What happened is not what the transcript says.
    """


def read_documents(paths: Iterable[Path]) -> Iterator[Any]:
    """
    All documents of YAML files, as they are; empty ones are left out.
    """
    for path in paths:
        with path.open(encoding="utf-8") as file:
            yield from (document for document in yaml.safe_load_all(file) if document is not None)


def run_transcript(transcript: Transcript, opener: Opener, *, restart: bool = False) -> None:
    """
    Do what a transcript says, and compare.

    Args:
        transcript: the transcript.
        opener: starts the runner.
        restart: also stop and start the runner between all steps.

    Raises:
        TranscriptError: other panes came than the transcript says.
        MillpondError: it describes something impossible.
    """
    run = opener(transcript.strategy())
    try:
        _Play(run, restart=restart).play(transcript.steps)
    finally:
        run.close()


class _Play:
    """
    A transcript being played: the panes that nobody has expected yet, and the watermarks.
    """

    def __init__(self, run: TranscriptRun, *, restart: bool) -> None:
        self._run = run
        self._restart = restart
        self._panes: list[dict[str, Any]] = []
        self._watermarks: dict[float, float] = {}

    def play(self, steps: Sequence[Step]) -> None:
        for number, step in enumerate(steps):
            if number and self._restart:
                self._run.restart()
            if step.action == "expect":
                self._expect(step.argument or [])
                continue
            self._nothing_left(f"before {step.action}: {step.argument}")
            self._do(step)
            self._panes += self._run.panes()
        self._nothing_left("at the end")

    def _do(self, step: Step) -> None:
        match step.action:
            case "input":
                self._run.inject(elements_of(step.argument))
            case "watermark":
                self._move(marks_of(step.argument))
            case "clock":
                if step.argument < 0:
                    raise TranscriptError(f"The clock goes back by {-step.argument}")
                self._run.advance_clock(seconds_us(step.argument))
            case "restart" if step.argument:
                self._run.restart()
            case "expect_dropped":
                dropped = self._run.dropped()
                if dropped != step.argument:
                    raise TranscriptError(f"Dropped {dropped} elements, expected {step.argument}")

    def _move(self, marks: Mapping[float, float]) -> None:
        for percentile, mark in marks.items():
            known = self._watermarks.get(percentile, -math.inf)
            if not mark >= known:
                raise TranscriptError(f"The watermark falls from {known} to {mark}")
        self._watermarks |= marks
        moved = {percentile: mark for percentile, mark in marks.items() if mark > -math.inf}
        if moved:
            self._run.advance_watermarks(
                {each: None if mark == math.inf else seconds_us(mark) for each, mark in moved.items()}
            )

    def _expect(self, expected: Sequence[dict[str, Any]]) -> None:
        for one in expected:
            found = next((pane for pane in self._panes if matches(one, pane)), None)
            if found is None:
                raise TranscriptError(f"Unmatched output {one} in {self._panes}")
            self._panes.remove(found)

    def _nothing_left(self, when: str) -> None:
        if self._panes:
            raise TranscriptError(f"Unexpected output {self._panes} {when}")


def failure_of(document: Any, opener: Opener, *, restart: bool = False) -> str | None:
    """
    Why a document fails; ``None`` if it passes, be it by failing as it says.
    """
    expected = document.get("error") if isinstance(document, dict) else None
    try:
        run_transcript(read_transcript(document), opener, restart=restart)
    except Exception as error:  # noqa: BLE001 - whatever it was, it is this document's failure
        if expected is not None and str(expected) in str(error):
            return None
        why = str(error) if isinstance(error, TranscriptError | MillpondError) else repr(error)
        return why if expected is None else f"failed with {why}, not with {expected!r}"
    return None if expected is None else f"passed, but should fail with {expected!r}"


def _spark() -> SparkSession:
    from pyspark.sql import SparkSession

    # Workers would otherwise start whatever `python3` is first on the path, without our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    builder = SparkSession.builder.master("local[2]").appName("millpond-transcripts")
    for name, value in options.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _opener(runner: str) -> tuple[Opener, Callable[[], None]]:
    if runner == "local":
        return LocalTranscriptRun, lambda: None
    spark = _spark()
    return lambda strategy: SparkTranscriptRun(strategy, spark), spark.stop


@click.command(name="millpond.testing.transcripts")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--runner", type=click.Choice(["local", "spark"]), default="local", show_default=True)
@click.option("--restart", is_flag=True, help="Stop the runner and start it again between all steps.")
def main(files: tuple[Path, ...], runner: str, *, restart: bool) -> None:
    """
    Run every transcript of FILES; exit with 1 if any fails.
    """
    opener, release = _opener(runner)
    passed = failed = 0
    try:
        for document in read_documents(files):
            name = document.get("name", "unnamed") if isinstance(document, dict) else "unnamed"
            why = failure_of(document, opener, restart=restart)
            click.echo(f"ok {name}" if why is None else f"FAILED {name}: {why}")
            passed, failed = passed + (why is None), failed + (why is not None)
    except yaml.YAMLError as error:
        raise InvalidError(f"not YAML: {error}") from error
    finally:
        release()
    click.echo(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
