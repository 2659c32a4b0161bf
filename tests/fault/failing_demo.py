"""The demo with a detector that fails at some hours, twice each, after some row files were written.

The first failure of an hour may end a superstep that the driver brings to the workers itself, the second a Spark task.

`test_demo_kills` runs it as ``python -m tests.fault.failing_demo``, with the options of the demo.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import millpond as mp
from examples.zeitgeist.__main__ import main
from examples.zeitgeist.computations import Detector
from examples.zeitgeist.job import zeitgeist

_FAILING_HOURS: Final = ("-25T17:00Z", "-30T17:00Z", "-04T17:00Z", "-08T17:00Z")
_FAILURES: Final = 2


class TaskFailedError(BaseException):
    """Fails the task, not the record: the engine handles only an `Exception`."""


class FailingDetector(Detector):
    """Fails at some hours, in the first attempts only.

    Args:
        marks: folder in which a file is left for each failure.
    """

    def __init__(self, marks: str) -> None:
        super().__init__()
        self._marks = marks

    def process_timer(self, context: mp.Context, timer: mp.Timer) -> None:
        super().process_timer(context, timer)
        if not timer.tag.endswith(_FAILING_HOURS):
            return
        for failure in range(_FAILURES):
            with suppress(FileExistsError):
                Path(self._marks, f"failed-{timer.tag}-{failure}").touch(exist_ok=False)
                raise TaskFailedError(timer.tag)


if __name__ == "__main__":
    main(obj=lambda tables: zeitgeist(tables, detector=FailingDetector(str(tables.parent.resolve()))))
