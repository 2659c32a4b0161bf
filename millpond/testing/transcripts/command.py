"""Runs transcripts: windows, triggers and time described in YAML, on the real runners.

``python -m millpond.testing.transcripts FILE…`` runs every document of each file and prints a line
for each. The format is that of Apache Beam's trigger transcripts with a few additional steps and
fields, so Beam's cases run unchanged.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import click
import yaml

from millpond.statestore.errors import InvalidError, MillpondError
from millpond.statestore.visible import visible_lines
from millpond.testing.transcripts.constructors import seconds_us
from millpond.testing.transcripts.runs import LocalTranscriptRun, SparkTranscriptRun, TranscriptRun
from millpond.testing.transcripts.transcript import (
    Step,
    elements_of,
    marks_of,
    matches,
    read_transcript,
    signal_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Opener: TypeAlias = Callable[..., TranscriptRun]
"""Starts a runner for windowed steps, given the `Stage` of each."""


_TOGETHER: Final = {"local": 1, "spark": 50}
_LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The same in C, an eighth of the time, where PyYAML was built with it."""


class TranscriptError(Exception):
    """The run differs from the transcript."""


def read_documents(paths: Iterable[Path]) -> Iterator[Any]:
    """All non-empty documents of YAML files, unparsed.

    Raises:
        InvalidError: a file is no YAML, or no text in UTF-8; the error names the file and the line.
    """
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                yield from (document for document in yaml.load_all(file, _LOADER) if document is not None)
        except (yaml.YAMLError, ValueError, AttributeError) as error:
            # PyYAML raises the last one for a time that is none.
            mark = getattr(error, "problem_mark", None)
            place = path if mark is None else f"{path}:{mark.line + 1}"
            reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise InvalidError("a transcript must be YAML", file=place, reason=reason) from error


class _Part:
    """One transcript of a play: its position, its panes not yet expected, and its watermarks."""

    def __init__(self, document: Any) -> None:
        self.document = document
        self.number = 0
        self.due_us = 0
        self.is_over = False
        self.failure: Exception | None = None
        self._panes: list[dict[str, Any]] = []
        self._watermarks: dict[float, float] = {}
        try:
            transcript = read_transcript(document)
            self.stage = transcript.stage()
            self._steps = iter(transcript.steps)
        except Exception as failure:  # noqa: BLE001 - whatever it was, it is this document's failure
            self.fail(failure)

    def act(self, run: TranscriptRun) -> None:
        """Check everything expected now, then do the next step; a failure ends the part."""
        try:
            self._act(run)
        except Exception as failure:  # noqa: BLE001 - whatever it was, it is this transcript's failure
            self.fail(failure)

    def collect(self, run: TranscriptRun) -> None:
        """Fetch the panes emitted since the last call."""
        if not self.is_over:
            self._panes += run.panes(self.number)

    def fail(self, failure: Exception) -> None:
        """End the part with a failure."""
        self.is_over, self.failure = True, failure

    def _act(self, run: TranscriptRun) -> None:
        for step in self._steps:
            if step.action == "expect":
                self._expect(step.argument or [])
                continue
            self._nothing_left(f"before {step.action}: {step.argument}")
            self._do(step, run)
            return
        self._nothing_left("at the end")
        self.is_over = True

    def _do(self, step: Step, run: TranscriptRun) -> None:
        match step.action:
            case "input":
                run.inject(elements_of(step.argument), self.number)
            case "watermark":
                self._move(marks_of(step.argument), run)
            case "signal":
                run.signal(signal_of(step.argument), self.number)
            case "clock":
                if step.argument < 0:
                    raise TranscriptError(f"The clock goes back by {-step.argument}")
                self.due_us += seconds_us(step.argument)
            case "restart" if step.argument:
                run.restart()
            case "expect_dropped":
                dropped = run.dropped(self.number)
                if dropped != step.argument:
                    raise TranscriptError(f"Dropped {dropped} elements, expected {step.argument}")

    def _move(self, marks: Mapping[float, float], run: TranscriptRun) -> None:
        for percentile, mark in marks.items():
            known = self._watermarks.get(percentile, -math.inf)
            if not mark >= known:
                raise TranscriptError(f"The watermark falls from {known} to {mark}")
        self._watermarks |= marks
        moved = {percentile: mark for percentile, mark in marks.items() if mark > -math.inf}
        if moved:
            ends = {
                percentile: None if mark == math.inf else seconds_us(mark)
                for percentile, mark in moved.items()
            }
            run.advance_watermarks(ends, self.number)

    def _expect(self, expected: Sequence[dict[str, Any]]) -> None:
        if not isinstance(expected, list) or not all(isinstance(fields, dict) for fields in expected):
            raise TranscriptError(f"Expected panes are a list of mappings, not {expected!r}")
        for fields in expected:
            match = next((pane for pane in self._panes if matches(fields, pane)), None)
            if match is None:
                raise TranscriptError(f"Unmatched output {fields} in {self._panes}")
            self._panes.remove(match)

    def _nothing_left(self, when: str) -> None:
        if self._panes:
            raise TranscriptError(f"Unexpected output {self._panes} {when}")


def _play(parts: Sequence[_Part], opener: Opener, *, restart: bool) -> None:
    """Play transcripts side by side in one run."""
    if not parts:
        return
    run = opener(*(part.stage for part in parts))
    try:
        _play_on(parts, run, restart=restart)
    finally:
        run.close()


def _play_on(parts: Sequence[_Part], run: TranscriptRun, *, restart: bool) -> None:
    """Advance each part by one step per round, while the clock shows its time."""
    now_us = 0
    while active := [part for part in parts if not part.is_over]:
        due_us = min(part.due_us for part in active)
        if due_us > now_us:
            run.advance_clock(due_us - now_us)
            now_us = due_us
            for part in active:
                part.collect(run)
        for part in active:
            if part.due_us == now_us:
                part.act(run)
        for part in active:
            part.collect(run)
        if restart:
            run.restart()


def failures_of(documents: Sequence[Any], opener: Opener, *, restart: bool = False) -> list[str | None]:
    """Play documents side by side in one run.

    Args:
        documents: as read from YAML.
        opener: starts the runner.
        restart: also stop and start the runner between all steps.

    Returns:
        Why each document fails; ``None`` if it passes, or fails as declared. A document that
        fails in company is played again alone, and that result counts.
    """
    parts = [_Part(document) for document in documents]
    playing = [part for part in parts if not part.is_over]
    for number, part in enumerate(playing):
        part.number = number
    try:
        _play(playing, opener, restart=restart)
    except Exception as failure:  # noqa: BLE001 - a failure of the run ends all parts
        for part in playing:
            part.fail(part.failure or failure)
    whys = [_why(part.document, part.failure) for part in parts]
    return [
        failure_of(part.document, opener, restart=restart) if why is not None and len(playing) > 1 else why
        for part, why in zip(parts, whys, strict=True)
    ]


def failure_of(document: Any, opener: Opener, *, restart: bool = False) -> str | None:
    """Why a document fails when played alone; ``None`` if it passes, or fails as declared."""
    return failures_of([document], opener, restart=restart)[0]


def _why(document: Any, error: Exception | None) -> str | None:
    expected = document.get("error") if isinstance(document, dict) else None
    if error is None:
        return None if expected is None else f"passed, but should fail with {expected!r}"
    if expected is not None and str(expected) in str(error):
        return None
    why = str(error) if isinstance(error, TranscriptError | MillpondError) else repr(error)
    return why if expected is None else f"failed with {why}, not with {expected!r}"


_CHECKPOINT_MANAGER: Final = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)


def _spark() -> SparkSession:
    from pyspark.sql import SparkSession

    # Workers would otherwise run the first `python3` on the path, without our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINT_MANAGER,
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
    return partial(SparkTranscriptRun, spark=spark), spark.stop


@click.command(name="python -m millpond.testing.transcripts")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--runner", type=click.Choice(["local", "spark"]), default="local", show_default=True)
@click.option("--restart", is_flag=True, help="Stop the runner and start it again between all steps.")
@click.option(
    "--together",
    type=click.IntRange(1),
    help="How many documents share a run, side by side; 1 on the local runner and 50 on Spark unless given.",
)
def main(files: tuple[Path, ...], runner: str, *, restart: bool, together: int | None) -> None:
    """Run every transcript of FILES; exit with 1 if any fails."""
    try:
        documents = list(read_documents(files))
    except InvalidError as error:
        raise click.UsageError(visible_lines(str(error))) from error
    if not documents:
        raise click.UsageError(f"no transcript is in {', '.join(map(str, files))}")
    size = together or _TOGETHER[runner]
    opener, release = _opener(runner)
    passed = failed = 0
    try:
        for start in range(0, len(documents), size):
            group = documents[start : start + size]
            for document, why in zip(group, failures_of(group, opener, restart=restart), strict=True):
                name = document.get("name", "unnamed") if isinstance(document, dict) else "unnamed"
                click.echo(f"ok {name}" if why is None else f"FAILED {name}: {why}")
                passed, failed = passed + (why is None), failed + (why is not None)
    finally:
        release()
    click.echo(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)
