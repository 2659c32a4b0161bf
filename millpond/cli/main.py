"""The command line ``millpond``: its commands, each imported when it is used.

Commands that only read take no lease, start no ZooKeeper and change nothing, so they may be
used on a store that is being written to.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

import click

from millpond.cli.terminal.cli_help import TeachingGroup

# In the order of the page of reference.
_HOMES: Final = {
    "run": "millpond.cli.run",
    "status": "millpond.cli.status",
    "rows": "millpond.cli.rows",
    "sql": "millpond.cli.rows",
    "history": "millpond.cli.history",
    "verify": "millpond.cli.maintenance",
    "repair": "millpond.cli.restore",
    "adopt": "millpond.cli.restore",
    "take-over": "millpond.cli.restore",
    "ensemble": "millpond.cli.ensemble",
    "dead-letters": "millpond.cli.dead_letters",
    "intervals": "millpond.cli.intervals",
    "savepoint": "millpond.cli.versions",
    "fork": "millpond.cli.versions",
    "load": "millpond.cli.load",
    "import-checkpoint": "millpond.cli.load",
    "export": "millpond.cli.export",
    "rewind": "millpond.cli.restore",
    "replay": "millpond.cli.versions",
    "diff": "millpond.cli.diff",
    "upgrade": "millpond.cli.maintenance",
    "gc": "millpond.cli.maintenance",
    "bench": "millpond.cli.bench",
    "completion": "millpond.cli.completion",
}


def _version() -> str:
    try:
        return version("millpond")
    except PackageNotFoundError:
        return "unknown: not installed"


@click.group(
    cls=TeachingGroup,
    examples=(
        "millpond run flights:pipeline --store pond --input flights=flights",
        "millpond status pond",
        "millpond rows pond window_counter --key EWR",
        "millpond sql pond \"select key, state ->> 'count' from window_counter\"",
        "millpond history pond",
    ),
    homes=_HOMES,
)
@click.version_option(_version(), prog_name="millpond")
def main() -> None:
    """Run pipelines on files, and inspect and maintain Millpond stores.

    A store is a folder (or a URL) in which a pipeline keeps, for each computation, one row per
    key: the key's state and its pending timers. Every superstep of the pipeline is one version of the
    store, and each version is a consistent picture of the whole pipeline.

    `run`, `load`, `import-checkpoint`, `upgrade`, `repair`, `rewind`, `adopt`, `take-over`, `ensemble --move-to`,
    `savepoint`, `gc`, `dead-letters retry`, `drop` and
    `withdraw`, and `intervals --split` and `--merge` change a store. All others only read it: they take no lease and
    start no server, so you can use them while the pipeline runs.

    Each command prints JSON with `--json`, the result alone on standard output. `millpond completion bash` makes the
    shell complete names.
    """
