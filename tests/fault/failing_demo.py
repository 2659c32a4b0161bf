"""The demo with a detector whose tasks fail at their first attempt, after writing some row files.

`test_demo_kills` runs it as ``python -m tests.fault.failing_demo``, with the options of the demo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pyspark import TaskContext

import millpond as mp
from examples.zeitgeist.__main__ import main
from examples.zeitgeist.computations import Detector
from examples.zeitgeist.job import zeitgeist

_FAILING_HOURS: Final = ("-25T17:00Z", "-30T17:00Z", "-04T17:00Z", "-08T17:00Z")


class TaskFailedError(BaseException):
    """Fails the task, not the record: the engine handles only an `Exception`."""


class FailingDetector(Detector):
    """Fails at some hours, at the first attempt of a task only.

    Args:
        marks: folder in which a file is left for each failure.
    """

    def __init__(self, marks: str) -> None:
        super().__init__()
        self._marks = marks

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        super().process_timer(context, timer)
        task = TaskContext.get()
        if task is not None and task.attemptNumber() == 0 and timer.tag.endswith(_FAILING_HOURS):
            (Path(self._marks) / f"failed-{timer.tag}-{context.key}").touch()
            raise TaskFailedError(timer.tag)


if __name__ == "__main__":
    main(obj=lambda tables: zeitgeist(tables, detector=FailingDetector(str(tables.parent.resolve()))))
