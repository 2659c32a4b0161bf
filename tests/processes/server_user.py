"""A process that uses the ZooKeeper servers of folders, started together with others.

``python -m tests.processes.server_user`` obeys the commands on its standard input, a line each,
and answers each with a line:

- ``open FOLDER`` starts or joins the folder's server and writes a node there: ``open HOST:PORT``;
- ``close`` stops using it: ``closed``.

A command that fails is answered with ``failed``, the error's text and its notes, in one line.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from traceback import format_exception_only
from typing import Final

from kazoo.client import KazooClient

from millpond.statestore.errors import MillpondError
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.system import SystemClock, SystemRng

_CONNECT_S: Final = 60.0


def main() -> None:
    """Obey until the standard input ends."""
    opened = ExitStack()
    for line in sys.stdin:
        command, _, folder = line.rstrip("\n").partition(" ")
        try:
            answer = _open(Path(folder), opened) if command == "open" else _close(opened)
        except MillpondError as error:
            opened.close()
            answer = "failed " + "".join(format_exception_only(error)).strip().replace("\n", " | ")
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    opened.close()


def _open(folder: Path, opened: ExitStack) -> str:
    server = EmbeddedZooKeeper(folder, SystemClock(), SystemRng(), is_open=True)
    hosts = server.start_or_join()
    opened.callback(server.close)
    client = KazooClient(hosts, timeout=_CONNECT_S)
    opened.callback(client.close)
    client.start(_CONNECT_S)
    opened.callback(client.stop)
    client.create(f"/user-{os.getpid()}-", ephemeral=True, sequence=True)
    return f"open {hosts}"


def _close(opened: ExitStack) -> str:
    opened.close()
    return "closed"


if __name__ == "__main__":
    main()
