"""A command of ``millpond`` that ends, as by ``kill -9``, right before one of its changes of files.

``python -m tests.fault.killed_command FOLDER NUMBER ARGUMENT …`` runs ``millpond ARGUMENT …`` and ends
before change number ``NUMBER``, from 0, of a file below ``FOLDER``: before it is opened to be written, or gets another
name, or is removed. If the command comes to its end, it prints how many changes there were.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from millpond.cli.main import main as millpond

KILLED: Final = 137
"""The exit code of a command that has been ended."""

_CHANGES: Final = ("os.remove", "os.rename", "os.link", "os.mkdir")


def main(arguments: list[str]) -> None:
    folder, number, *rest = arguments
    seen = [0]

    def count(event: str, told: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(told[2], int) and bool(told[2] & (os.O_WRONLY | os.O_RDWR))
        if (writes or event in _CHANGES) and str(told[0]).startswith(folder):
            if seen[0] == int(number):
                os._exit(KILLED)
            seen[0] += 1

    sys.addaudithook(count)
    try:
        millpond(rest, standalone_mode=False)
    finally:
        sys.stdout.write(f"{seen[0]}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
