"""A directory of files as an outside source (MillWheel §5.2, figure 10).

The injector reports the creation time of the oldest unfinished file as watermark: a log that was opened at ten o'clock
has no rows from before ten. A file is finished once all its rows are durable and it gets no more. If several senders
write into the directory, each has its own watermark, and the stream waits for every expected sender, also before its
first file appears.

Every row gets a unique name, `FILE_ROW`. Declared as the injector's ``id``, it makes rows count once although the
directory is read again after a crash. So the injector stores no finished files; ``finished`` is called for each, to
move it out of the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

from millpond.executor.pipeline.topology import Topology
from millpond.executor.time.instants import Instant, instant_us
from millpond.statestore.arguments import check_function
from millpond.statestore.errors import InvalidError, UnavailableError
from millpond.statestore.objects.obstore import file_here
from millpond.statestore.types import EventTimeMicros

FILE_ROW: Final = "file_row"
"""The field with a row's unique name, file and position; declare it as the injector's ``id``."""

_ROWS_MAX: Final = 10_000


class DirectoryRun(Protocol):
    """The run that a `DirectoryInjector` feeds; the runs of both runners fit."""

    @property
    def topology(self) -> Topology: ...
    def inject_durably(self, stream: str, rows: list[dict[str, Any]]) -> None: ...
    def advance_watermark(self, stream: str, at: Instant, *, member: str | None = None) -> object: ...


@dataclass(slots=True)
class _File:
    """An unfinished file, with its member and the number of its durable rows."""

    path: Path
    created_at: EventTimeMicros
    member: str | None = None
    rows: int = 0


class DirectoryInjector:
    """A source that feeds the files of a directory into one stream of a run, oldest first.

    Args:
        run: the running pipeline, of either runner; its stream should have a `ManualWatermark`. On Spark
            open it with `SparkRunner.open`; the driver reads the files.
        stream: the stream.
        folder: the directory.
        read: returns the rows of a file, the same rows in the same order each time.
        created: returns the creation time of a file, for example from its name. No row may be older.
        pattern: glob pattern of the files to read.
        is_closed: returns True once a file gets no more rows; by default files appear complete.
        finished: called once all rows of a file are durable; typically moves the file elsewhere.
        member: returns the sender of a file, for example from its name; required if the stream has
            ``members``, the set of expected senders (MillWheel §5.2). A member without a file so far
            holds the watermark until a file appears or the member is declared gone. Files of other
            senders are read, and move no watermark.

    Example::

        logs = DirectoryInjector(run, "logs", "/var/log/app", read=read_json_lines, created=by_name)
        while True:
            logs.poll()

    Raises:
        InvalidError: the stream is not injected, its rows have no ids, or only one of ``member`` and the
            stream's ``members`` is given.
    """

    def __init__(
        self,
        run: DirectoryRun,
        stream: str,
        folder: Path | str,
        *,
        read: Callable[[Path], Iterable[Mapping[str, Any]]],
        created: Callable[[Path], Instant],
        pattern: str = "*",
        is_closed: Callable[[Path], bool] | None = None,
        finished: Callable[[Path], None] | None = None,
        member: Callable[[Path], str] | None = None,
    ) -> None:
        injector = run.topology.injector(stream)
        if injector.id is None:
            raise InvalidError("rows of files need ids, for they are read again after a crash", stream=stream)
        if bool(injector.members) != (member is not None):
            raise InvalidError(
                "a stream's members and the member of a file belong together",
                stream=stream,
                members=list(injector.members),
            )
        for name, function in (("read", read), ("created", created)):
            check_function(name, function, stream=stream)
        for name, hook in (("is_closed", is_closed), ("finished", finished), ("member", member)):
            check_function(name, hook, optional=True, stream=stream)
        self._members: tuple[str | None, ...] = injector.members or (None,)
        self._member = member
        self._run = run
        self._stream = stream
        self._folder = file_here(folder)
        self._read = read
        self._created = created
        self._pattern = pattern
        self._is_closed = is_closed
        self._finished = finished
        self._unfinished: dict[Path, _File] = {}
        self._done: set[Path] = set()

    @property
    def mark(self) -> EventTimeMicros | None:
        """Creation time of the oldest unfinished file, in microseconds; ``None`` without such a file."""
        return min((file.created_at for file in self._unfinished.values()), default=None)

    def poll(self) -> int:
        """List the directory once: inject new rows and report the watermark.

        Returns:
            The number of files that were finished.

        Raises:
            UnavailableError: the directory or a file cannot be read.
            InvalidError: no row of the first file has the fields that the injector names.
            MillpondError: the error that ended the run.
        """
        try:
            paths = {path for path in self._folder.glob(self._pattern) if path.is_file()}
        except OSError as cause:
            raise UnavailableError("the directory cannot be read", folder=self._folder) from cause
        self._done &= paths
        for path in paths - self._done - self._unfinished.keys():
            member = None if self._member is None else self._member(path)
            self._unfinished[path] = _File(path, instant_us(self._created(path)), member)
        self._report()
        done = 0
        for file in sorted(self._unfinished.values(), key=attrgetter("created_at", "path")):
            if self._inject(file):
                done += 1
                del self._unfinished[file.path]
                self._done.add(file.path)
                self._report()
                if self._finished is not None:
                    self._finished(file.path)
        return done

    def _inject(self, file: _File) -> bool:
        """Inject the rows that are not durable yet; return True if the file is finished."""
        # Ask before reading, so that no row is missed that was written before the file was closed.
        is_closed = self._is_closed is None or self._is_closed(file.path)
        name = file.path.relative_to(self._folder)
        try:
            rows = islice(self._read(file.path), file.rows, None)
            while some := list(islice(rows, _ROWS_MAX)):
                piece = [{**row, FILE_ROW: f"{name}:{number}"} for number, row in enumerate(some, file.rows)]
                self._run.inject_durably(self._stream, piece)
                file.rows += len(piece)
        except OSError as cause:
            raise UnavailableError("a file cannot be read", file=file.path) from cause
        return is_closed

    def _report(self) -> None:
        for member in self._members:
            marks = [file.created_at for file in self._unfinished.values() if file.member == member]
            if marks:
                self._run.advance_watermark(self._stream, min(marks), member=member)
