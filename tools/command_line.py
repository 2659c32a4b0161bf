"""
The command line ``millpond``: one file per command, registered here.

Commands that only read take no lease, start no ZooKeeper and change nothing, so they may be
used on a store that is being written to.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import click

from millpond.tools.adopt import adopt
from millpond.tools.cli_help import TeachingGroup
from millpond.tools.collect import collect
from millpond.tools.history import history
from millpond.tools.repair import repair
from millpond.tools.rows import rows
from millpond.tools.sql import sql
from millpond.tools.status import status
from millpond.tools.verify import verify

__all__ = ["main"]


def _version() -> str:
    try:
        return version("millpond")
    except PackageNotFoundError:
        return "unknown: not installed"


@click.group(
    cls=TeachingGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=(
        "millpond status pond",
        "millpond rows pond window_counter --key EWR",
        "millpond sql pond \"select key, state ->> 'count' from window_counter\"",
        "millpond history pond",
    ),
)
@click.version_option(_version(), prog_name="millpond")
def main() -> None:
    """
    Inspect and maintain Millpond stores.

    A store is a folder (or a URL) in which a pipeline keeps, for each computation, one row per
    key: the key's state and its pending timers. Every superstep of the pipeline is one version of the
    store, and each version is a consistent picture of the whole pipeline.

    All commands except `gc`, `repair` and `adopt` only read. They take no lease and start no server, so you
    can use them while the pipeline runs.
    """


for _command in (status, rows, sql, history, verify, repair, adopt, collect):
    main.add_command(_command)
