"""Progress bars: on standard error, only in a terminal, and gone when the work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from millpond.executor.local.row_source import RowSource
from millpond.executor.pipeline.extract_rows import Rows
from millpond.tools.terminal.output import is_terminal

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
