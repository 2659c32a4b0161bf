"""Requests to an object store: to open a store, its status, a start with a sink, and one superstep.

The store is made in memory, by the number of versions of its table, and copied to moto's S3 server. A proxy in between
counts the requests. They are counts and not times, so a shared machine measures as well as an idle one.

    python -m benchmarks.requests --versions 317 --versions 10000
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import click
from click.testing import CliRunner

from benchmarks.json_result import tell_result
from millpond.cli.main import main as millpond
from millpond.executor.local.intake import Receipt
from millpond.executor.local.run import LocalRun
from millpond.executor.local.runner import LocalRunner
from millpond.executor.maintenance.policy import UpkeepPolicy
from millpond.executor.pipeline.pipeline import EnginePipeline
from millpond.executor.sinks.sink import DeltaSink
from millpond.statestore.history.lineage import Adoption
from millpond.statestore.leases.memory import MemoryLeases, MemoryRegistry
from millpond.statestore.log.log import LOG_FOLDER, Log
from millpond.statestore.log.snapshot import load
from millpond.statestore.objects.memory import MemoryObjects
from millpond.statestore.objects.obstore import open_objects
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Objects
from millpond.testing.fixtures.determinism import ManualClock
from millpond.testing.processes.ledger import ROWS, ledger_pipeline, numbered
from millpond.testing.servers.s3_proxy import S3Proxy
from millpond.testing.servers.s3_server import S3Server, s3_options

CLOCK: Final = SystemClock()
_SINK: Final = "sink"
_PATIENCE: Final = "120s"
_WARM_UP_US_MAX: Final = 120_000_000
# Supersteps between two checkpoints; fewer are two requests of one.
_PACE_OF_CHECKPOINTS: Final = range(4, 32)
# Slow enough that replaced files are deleted as in a store of that age.
_PACE_MS: Final = 60_000
_KINDS: Final = (
    ("boundary", r"log_boundary"),
    ("mark", r"high_water"),
    ("checkpoint", r"checkpoint"),
    ("commit", r"_delta_log/\d+\.json"),
    ("log", r"_delta_log"),
    ("data file", r"\.parquet"),
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """A store, ``pond``, and the table of its sink, in a bucket behind a proxy that counts."""

    url: str
    proxy: S3Proxy
    registry: MemoryRegistry

    def open(self, adopt: Adoption | None = None) -> Store:
        return Store.open(
            f"{self.url}/pond",
            storage_options=s3_options(self.proxy.address),
            adopt=adopt,
            leases=lambda _, writer_id: MemoryLeases(self.registry, CLOCK, writer_id=writer_id),
        )

    def read(self) -> None:
        options = s3_options(self.proxy.address)
        Store.open(f"{self.url}/pond", storage_options=options, create=False, read_only=True).close()

    def status(self) -> None:
        options = s3_options(self.proxy.address).items()
        arguments = [f"--storage-option={name}={value}" for name, value in options]
        told = CliRunner().invoke(millpond, ["status", f"{self.url}/pond", "--json", *arguments])
        if told.exit_code:
            raise click.ClickException(told.output)

    @contextmanager
    def running(self, pipeline: EnginePipeline) -> Iterator[LocalRun]:
        with self.open() as store, LocalRunner(store, progress=False).start(pipeline) as run:
            yield run

    def count(self, action: Callable[[], object], times: int = 1) -> dict[str, float]:
        """Return the number of requests of each kind, and of all, that an action makes, by the ``times`` it acts."""
        self.proxy.requests.clear()
        action()
        counted: Counter[str] = Counter()
        # Copied at once: helper processes go on.
        for (method, path), number in dict(self.proxy.requests).items():
            counted[f"{method} {kind_of(path)}"] += number
        each = {kind: round(number / times, 2) for kind, number in sorted(counted.items())}
        return {"all": round(counted.total() / times, 2), **each}


def kind_of(path: str) -> str:
    """Return the kind of object, and the table, that a request is about."""
    kind = next((kind for kind, pattern in _KINDS if re.search(pattern, path)), "other")
    return f"{_SINK}'s {kind}" if f"/{_SINK}" in path or f"={_SINK}" in path else kind


class _ManyObjects(MemoryObjects):
    """A store in memory that is kept as one in an object store is."""

    def get_many(self, paths: Sequence[str]) -> Sequence[bytes | None]:
        return [self.get(path) if path in self._objects else None for path in paths]


def fill(url: str, server: S3Server, versions: int) -> None:
    """Make a store whose table has a number of versions, a superstep of one record a minute, and copy it to the bucket."""
    clock = ManualClock(CLOCK.now_us() - 1_000 * _PACE_MS * versions)
    with tempfile.TemporaryDirectory(prefix="millpond-requests-") as folder:
        rows = _ManyObjects()
        with Store.in_memory(objects=rows, clock=clock) as store:
            upkeep = UpkeepPolicy(background=False)
            runner = LocalRunner(store, progress=False, upkeep=upkeep, clock=clock)
            run = runner.start(ledger_pipeline(DeltaSink(folder)), stepping=True)
            while store.committer.snapshot.version < versions:
                clock.advance_ms(_PACE_MS)
                run.inject(ROWS, numbered([store.committer.snapshot.version]))
                run.run_until_quiet()
            run.stop()
        copy_table(rows, open_objects(f"{url}/pond/rows", server.options))
        copy_table(open_objects(folder), open_objects(f"{url}/{_SINK}", server.options))


def copy_table(source: Objects, target: Objects) -> None:
    """Copy the log and the live files; older files are not read."""
    live = [file.path for file in load(Log(source)).files]
    for path in [*source.list(LOG_FOLDER), *source.list("_millpond"), *live]:
        target.put_if_absent(path, source.get(path))


def measure(versions: int, supersteps: int, server: S3Server, proxy: S3Proxy) -> dict[str, Any]:
    """Count the requests on a store of that many versions."""
    bucket = Bucket(f"s3://{server.make_bucket(SystemRng().token())}", proxy, MemoryRegistry())
    fill(bucket.url, server, versions)
    sink = DeltaSink(f"{bucket.url}/{_SINK}", storage_options=s3_options(proxy.address))
    rows = (numbered([number]) for number in count(versions + 1))
    return {
        "versions": versions,
        **count_requests(bucket, ledger_pipeline(sink), lambda run: run.inject(ROWS, next(rows)), supersteps),
    }


def count_requests(
    bucket: Bucket, pipeline: EnginePipeline, inject: Callable[[LocalRun], Receipt], supersteps: int
) -> dict[str, Any]:
    """Count the requests of each act on the store in a bucket; ``inject`` gives a run its next superstep."""
    counts: dict[str, Any] = {
        "open_to_read": bucket.count(bucket.read),
        "open_to_write": bucket.count(lambda: bucket.open().close()),
        "status": bucket.count(bucket.status),
    }
    with ExitStack() as opened:
        runs: list[LocalRun] = []
        counts["start"] = bucket.count(lambda: runs.append(opened.enter_context(bucket.running(pipeline))))

        def write() -> None:
            inject(runs[0]).wait(_PATIENCE)

        # A helper process starts after two seconds. Where that takes long, it reads again what this process has
        # forgotten, also for its second checkpoint; from then on they come at their pace.
        began_us, since = CLOCK.monotonic_us(), _PACE_OF_CHECKPOINTS.stop
        while True:
            is_written = "PUT checkpoint" in bucket.count(write)
            if is_written and since in _PACE_OF_CHECKPOINTS:
                break
            since = 0 if is_written else since + 1
            if CLOCK.monotonic_us() - began_us > _WARM_UP_US_MAX:
                raise click.ClickException("checkpoints have not come at their pace for two minutes")
        counts["superstep"] = bucket.count(lambda: [write() for _ in range(supersteps)], supersteps)
    return counts


@click.command()
@click.option(
    "--versions", "sizes", multiple=True, default=[317], show_default=True, help="Versions of the table."
)
@click.option("--supersteps", default=50, show_default=True, help="How many supersteps are counted.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result to a file.")
def main(sizes: tuple[int, ...], supersteps: int, json_path: Path | None) -> None:
    """Count the requests that a store in an object store costs, by the age of the store."""
    with S3Server(CLOCK) as server, S3Proxy(server.port, CLOCK) as proxy:
        tell_result(
            {"sizes": [measure(size, supersteps, server, proxy) for size in sizes]}, json_path, indent=2
        )


if __name__ == "__main__":
    main()
