"""A process that is stopped (SIGSTOP) inside a transaction on a catalog, and pins a version once it continues.

``python -m tests.processes.catalog_holder URL creation|pin VERSION`` prints ``pinned``, or the error.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from millpond.statestore.catalog import catalog
from millpond.statestore.errors import MillpondError
from millpond.statestore.types import TableVersion


def stop_in(name: str) -> None:
    """Stop this process when the catalog's function of that name is about to return for the first time."""
    original = getattr(catalog, name)

    def stopped(*given: Any) -> Any:
        done = original(*given)
        setattr(catalog, name, original)
        os.kill(os.getpid(), signal.SIGSTOP)
        return done

    setattr(catalog, name, stopped)


def main(url: str, inside: str, version: str) -> None:
    stop_in("_belongs" if inside == "creation" else "replace_row")
    with catalog.Catalog.open(url) as opened:
        try:
            opened.publish_horizon("holder", TableVersion(int(version)), lifetime_ms=60_000)
            print("pinned")
        except MillpondError as error:
            print(error)


if __name__ == "__main__":
    main(*sys.argv[1:])
