"""
A directory of files as an outside source (MillWheel §5.2, figure 10).

The watermark that it reports is the creation time of the oldest file that is not finished: a
log that was opened at ten o'clock holds nothing from before ten. A file is finished when all
its rows are durable and nobody writes to it any more.

Every row carries a name that no other row has, `FILE_ROW`. Declared as the injector's ``id``,
it lets the directory be read again after a crash without anything counting twice. So nothing
is remembered about finished files; they should leave the directory, and ``finished`` is called
for each so that they can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from millpond.executor.event_time.duration import Instant, instant_us
from millpond.executor.local.run import LocalRun
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.types import EventTimeMicros

__all__ = ["FILE_ROW", "DirectoryInjector"]

FILE_ROW: Final = "file_row"
"""The field that names a row: file and position; declare it as the injector's ``id``."""

_ROWS_MAX: Final = 10_000


@dataclass(slots=True)
class _File:
    """
    A file that is not finished, and how many of its rows are durable.
    """

    path: Path
    created_at: EventTimeMicros
    rows: int = 0


class DirectoryInjector:
    """
    Feeds the files of a directory into one stream of a run, oldest first.

    Args:
        run: the running pipeline; its stream should have a `ManualWatermark`.
        stream: the stream.
        folder: the directory.
        read: gives the rows of a file, the same ones in the same order each time.
        created: when a file was created, by its name for example. No row of it may be older.
        pattern: which files of the directory count.
        is_closed: whether a file gets no more rows; by default files appear complete.
        finished: called once all rows of a file are durable; typically moves it away.

    Example::

        logs = DirectoryInjector(run, "logs", "/var/log/app", read=read_json_lines, created=by_name)
        while True:
            logs.poll()

    Raises:
        InvalidError: nobody injects this stream, or its rows have no ids.
    """

    def __init__(
        self,
        run: LocalRun,
        stream: str,
        folder: Path | str,
        *,
        read: Callable[[Path], Iterable[Mapping[str, Any]]],
        created: Callable[[Path], Instant],
        pattern: str = "*",
        is_closed: Callable[[Path], bool] | None = None,
        finished: Callable[[Path], None] | None = None,
    ) -> None:
        if run.topology.injector(stream).id is None:
            raise InvalidError("rows of files need ids, for they are read again after a crash", stream=stream)
        self._run = run
        self._stream = stream
        self._folder = Path(folder)
        self._read = read
        self._created = created
        self._pattern = pattern
        self._is_closed = is_closed
        self._finished = finished
        self._unfinished: dict[Path, _File] = {}
        self._done: set[Path] = set()

    @property
    def mark(self) -> EventTimeMicros | None:
        """
        Creation time of the oldest unfinished file; ``None`` when there is none.
        """
        return min((file.created_at for file in self._unfinished.values()), default=None)

    def poll(self) -> int:
        """
        Look at the directory once: inject what is new, then report the watermark.

        Returns:
            How many files were finished.

        Raises:
            UnavailableError: the directory or a file cannot be read.
            MillpondError: what ended the run.
        """
        self._look()
        self._report()
        done = 0
        for file in sorted(self._unfinished.values(), key=lambda each: (each.created_at, each.path)):
            if self._inject(file):
                done += 1
                self._finish(file)
        return done

    def _look(self) -> None:
        try:
            found = {path for path in self._folder.glob(self._pattern) if path.is_file()}
        except OSError as cause:
            raise UnavailableError("the directory cannot be read", folder=self._folder) from cause
        self._done &= found
        for path in found - self._done - self._unfinished.keys():
            self._unfinished[path] = _File(path, instant_us(self._created(path)))

    def _inject(self, file: _File) -> bool:
        """
        Inject the rows that are new, and say whether the file is finished.
        """
        # Asked before reading: rows written while it was still open must not be missed.
        is_closed = self._is_closed is None or self._is_closed(file.path)
        try:
            rows = islice(self._read(file.path), file.rows, None)
            while piece := self._piece(file, rows):
                self._run.inject_durably(self._stream, piece)
                file.rows += len(piece)
        except OSError as cause:
            raise UnavailableError("a file cannot be read", file=file.path) from cause
        return is_closed

    def _piece(self, file: _File, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        name = file.path.relative_to(self._folder)
        return [
            {**row, FILE_ROW: f"{name}:{number}"}
            for number, row in enumerate(islice(rows, _ROWS_MAX), file.rows)
        ]

    def _finish(self, file: _File) -> None:
        del self._unfinished[file.path]
        self._done.add(file.path)
        self._report()
        if self._finished is not None:
            self._finished(file.path)

    def _report(self) -> None:
        if self.mark is not None:
            self._run.advance_watermark(self._stream, self.mark)
