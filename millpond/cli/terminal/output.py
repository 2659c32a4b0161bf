"""Output of commands: tables for people, JSON for programs, times in UTC, and progress bars.

Tables fit the terminal. In a pipe or a file they are as wide as their contents, so that nothing is cut off.
Progress bars are on standard error, only in a terminal, and vanish when the work is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import click
from rich import progress
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from millpond.executor.inputs.extraction import Rows
from millpond.executor.local.rows import RowSource, SourceOf
from millpond.statestore.log.action import JsonValue
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US
from millpond.statestore.visible import visible, visible_json, visible_lines

OnProgress: TypeAlias = Callable[[int, int], None]
"""Takes the amount done and the whole amount."""

_PIPE_WIDTH: Final = 100_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_BYTES_PER_STEP: Final = 1024


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; numbers are aligned to the right, ``None`` is an empty cell."""
    listed = [tuple(row) for row in rows]
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(map(visible, columns)):
        values = [row[index] for row in listed if row[index] is not None]
        is_number = bool(values) and all(isinstance(value, int | float) for value in values)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in listed:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_WIDTH)
    console.print(table)
    if title:
        console.print()


def _cell(value: object) -> str:
    """Return a cell's text; a list has a line for each element."""
    if value is None:
        return ""
    if isinstance(value, list):
        return "\n".join(map(visible, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else visible(value)


def print_json(values: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object per line."""
    for value in values:
        click.echo(visible_json(json.dumps(value, ensure_ascii=False, default=str)))


def print_rows(
    values: Iterable[Mapping[str, object]],
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    as_json: bool,
) -> None:
    """Print one JSON object per line, or a table without a title."""
    if as_json:
        print_json(values)
    else:
        print_table("", columns, rows)


@contextmanager
def result_as_json(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict for the command's result, and print it at the end if ``as_json``.

    Messages then go to standard error, so that standard output is the result alone.
    """
    result: dict[str, Any] = {}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield result
    if as_json:
        print_json([result])


def is_terminal() -> bool:
    """Return True if standard error is a terminal that can redraw a line."""
    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal


def say(text: str) -> None:
    """Print lines for people."""
    click.echo(visible_lines(text))


def note(text: str) -> None:
    """Print a remark to standard error, so that it does not mix with the result in a pipe."""
    click.echo(visible(text), err=True)


def time_text(at_us: int | None) -> str | None:
    """Return a time as ISO 8601 text in UTC; the two ends of time have names.

    Example:
        >>> time_text(1_500_000)
        '1970-01-01T00:00:01.500000Z'
        >>> time_text(2**63 - 1)
        'end of time'
    """
    if at_us is None:
        return None
    if at_us == TIME_MAX_US:
        return "end of time"
    if at_us == TIME_MIN_US:
        return "before all time"
    try:
        at = _EPOCH + timedelta(microseconds=at_us)
    except OverflowError:
        return f"{at_us} us"
    return at.isoformat().replace("+00:00", "Z")


def size_text(size_bytes: int) -> str:
    """Return a size with a binary unit.

    Example:
        >>> size_text(1_536)
        '1.5 KiB'
    """
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < _BYTES_PER_STEP:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= _BYTES_PER_STEP
    return f"{size:.1f} TiB"


@contextmanager
def progress_bar(what: str) -> Iterator[OnProgress]:
    """Show a progress bar; call the yielded function to advance it."""
    with _bar(progress.MofNCompleteColumn()) as bar:
        task = bar.add_task(visible(what), total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def stages_bar(what: str, stages: Sequence[str]) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar for each stage of a work; call the yielded function to advance one.

    The last stage has the same whole amount as the others, so it sets theirs.
    """
    with _bar(progress.MofNCompleteColumn()) as bar:
        tasks = {stage: bar.add_task(visible(f"{stage} {what}"), total=None) for stage in stages}

        def on_progress(stage: str, done: int, of: int | None) -> None:
            bar.update(tasks[stage], completed=done, total=of)
            if stage == stages[-1]:
                for task in tasks.values():
                    bar.update(task, total=of)

        yield on_progress


@contextmanager
def rows_bar() -> Iterator[Callable[[str, RowSource], RowSource]]:
    """Yield a function that adds a progress bar to the source of a stream's rows."""
    with _bar(progress.MofNCompleteColumn(), progress.TimeRemainingColumn()) as bar:
        yield lambda stream, source: _ShownSource(source, stream, bar)


def _bar(*columns: progress.ProgressColumn) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *columns,
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        disable=not is_terminal(),
    )


class _ShownSource(SourceOf):
    """A source of rows that advances a progress bar while being read."""

    def __init__(self, source: RowSource, stream: str, bar: progress.Progress) -> None:
        super().__init__(source)
        self._stream = visible(stream)
        self._bar = bar
        self._task = bar.add_task(f"{self._stream}: opening the store", total=None)
        self._count: int | None = None
        self._has_consumed = False

    @property
    def count(self) -> int:
        if self._count is None:
            self._bar.update(self._task, description=f"{self._stream}: counting rows")
            self._count = self._source.count
            self._bar.update(self._task, total=self._count)
        return self._count

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        read = start
        for count, rows in self._source.pieces(start, records_max):
            if not self._has_consumed:
                self._bar.update(self._task, description=f"{self._stream}: reading times", completed=read)
            read += count
            yield count, rows

    def place(self, count: int) -> Mapping[str, JsonValue]:
        # Called as the rows are consumed.
        self._has_consumed = True
        self._bar.update(self._task, description=f"{self._stream}: rows consumed", completed=count)
        return self._source.place(count)
