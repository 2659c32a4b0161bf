"""Output of commands: tables for people, one JSON object per line for programs, times in UTC.

Tables fit the terminal; in a pipe or a file they are as wide as their contents, so
that nothing is cut off.

Progress bars: on standard error, only in a terminal, and gone when the work is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from millpond.executor.inputs.extraction import Rows
from millpond.executor.local.rows import RowSource
from millpond.statestore.types import TIME_MAX_US, TIME_MIN_US

_Command = TypeVar("_Command", bound=Callable[..., Any])

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
    for index, column in enumerate(columns):
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


def print_json(values: Iterable[Mapping[str, object]]) -> None:
    """Print one JSON object per line."""
    for value in values:
        click.echo(json.dumps(value, ensure_ascii=False, default=str))


def json_option(help_text: str) -> Callable[[_Command], _Command]:
    """Add the option --json to a command, as ``as_json``.

    Args:
        help_text: what is printed then.
    """
    return click.option("--json", "as_json", is_flag=True, help=help_text)


@contextmanager
def result_as_json(as_json: bool) -> Iterator[dict[str, Any]]:
    """What a command has done, as JSON if that is wanted: then it alone is on standard output, and messages are not.

    Args:
        as_json: whether it is wanted.

    Yields:
        What is printed at the end, to be filled.
    """
    result: dict[str, Any] = {}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield result
    if as_json:
        print_json([result])


def is_terminal() -> bool:
    """Whether standard error is a terminal that can show a line that moves."""
    console = Console(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal


def note(text: str) -> None:
    """Print a remark to standard error, so that it does not mix with the result in a pipe."""
    click.echo(text, err=True)


def time_text(at_us: int | None) -> str | None:
    """A time as ISO 8601 text in UTC; the two ends of time have names.

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
    """A size with a binary unit.

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


def number_text(number: int) -> str:
    """A number with thousands separators."""
    return f"{number:,}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return number_text(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


Told: TypeAlias = Callable[[int, int], None]
"""Says how much is done, and of how much."""


@contextmanager
def progress_bar(what: str) -> Iterator[Told]:
    """A bar that what is yielded moves; until it is called, only the time passes.

    Args:
        what: what is being done.
    """
    with _progress(MofNCompleteColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def stages_bar(what: str, stages: Sequence[str]) -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar for each stage of a work: what is yielded moves that of the stage that it names.

    How much there is of it in the last stage, there was in all of them.

    Args:
        what: what each stage counts.
        stages: their names, in order.
    """
    with _progress(MofNCompleteColumn()) as bar:
        tasks = {stage: bar.add_task(f"{stage} {what}", total=None) for stage in stages}

        def told(stage: str, done: int, of: int | None) -> None:
            bar.update(tasks[stage], completed=done, total=of)
            if stage == stages[-1]:
                for task in tasks.values():
                    bar.update(task, total=of)

        yield told


@contextmanager
def rows_bar() -> Iterator[Callable[[str, RowSource], RowSource]]:
    """A bar for each source of rows that what is yielded gets: it returns a source that moves its bar as it is read."""
    with _progress(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        yield lambda stream, source: ShownSource(source, stream, bar)


def _progress(*columns: MofNCompleteColumn | TimeRemainingColumn) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        disable=not is_terminal(),
    )


class ShownSource(RowSource):
    """A source of rows that shows how far it is read.

    Args:
        source: the source.
        stream: the injected stream that it is the input of.
        bar: where it is shown.
    """

    def __init__(self, source: RowSource, stream: str, bar: Progress) -> None:
        self._source = source
        self._stream = stream
        self._bar = bar
        self._task = bar.add_task(f"{stream}: opening the store", total=None)
        self._count: int | None = None
        self._has_consumed = False

    @property
    def count(self) -> int:
        """How many rows there are."""
        if self._count is None:
            self._bar.update(self._task, description=f"{self._stream}: counting rows")
            self._count = self._source.count
            self._bar.update(self._task, total=self._count)
        return self._count

    def pieces(self, start: int, records_max: int) -> Iterator[tuple[int, Rows]]:
        """The rows after the first ``start``, in pieces."""
        read = start
        for count, rows in self._source.pieces(start, records_max):
            if not self._has_consumed:
                self._bar.update(self._task, description=f"{self._stream}: reading times", completed=read)
            read += count
            yield count, rows

    def offsets(self, count: int) -> str | None:
        """Where the first ``count`` rows end; it is asked for as they are consumed."""
        self._has_consumed = True
        self._bar.update(self._task, description=f"{self._stream}: rows consumed", completed=count)
        return self._source.offsets(count)

    def check_offsets(self, count: int, stored: str) -> None:
        """Refuse a source whose first ``count`` rows do not end where they once did.

        Raises:
            InvalidError: rows have come or gone before that place.
        """
        self._source.check_offsets(count, stored)
