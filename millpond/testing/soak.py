"""A soak: fault scenarios in turn for minutes or days, next to a worker whose memory is sampled.

``python -m millpond.testing.soak --minutes 30`` runs each scenario on a fresh store repeatedly, on three
ZooKeepers, on disk and on an S3 server, checks every store against its history, and writes
``build/soak/report.json`` after every run: ``runs``, ``faults`` by class, ``violations``, ``recovery_p99_s``,
``takeover_p99_s`` with its bound, and ``memory_slope_mib_per_hour`` of a worker without faults. An existing
report is continued, so a long soak can be split into parts; ``--fresh`` starts a new one. The exit code is 1
after a violation.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import click
import orjson

from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.system import SystemClock, SystemRng
from millpond.statestore.types import Clock, Rng
from millpond.testing.faults.report import FaultReport
from millpond.testing.processes.scenarios import (
    IN_A_LEDGER,
    Ground,
    exits_at_failpoints,
    flipped_bits,
    lost_members,
    lost_quorum,
    random_kills,
    settle,
    stopped_owners,
    stormy_store,
)
from millpond.testing.processes.usage import UsageSampler, slope_per_hour
from millpond.testing.processes.worker import Nest, Worker, WorkerOptions
from millpond.testing.servers.s3_proxy import S3Proxy
from millpond.testing.servers.s3_server import S3Server, s3_options
from millpond.testing.servers.zookeeper import Ensemble

_SESSION_MS: Final = 1_000
_TAKEOVER_BOUND_S: Final = 2 * _SESSION_MS / 1_000 + 1.0
# The worker whose memory is sampled keeps a minute of log and of record ids: with the usual three hours of ids it would
# grow, as it should, for as long as a soak takes. Its event time advances a second every 20 ms.
_STEADY_KEPT: Final = 20
_STEADY_RETENTION: Final = "1m"
_STEADY_ID_SLACK: Final = "1m"
_WARM_UP_S: Final = 300.0
_SAMPLE_EVERY_MS: Final = 2_000
_MINUTE_US: Final = 60_000_000


class Soak:
    """One soak, in a separate folder.

    Args:
        folder: for stores; emptied after every run.
        report: the report's file.
        minutes: how long to run; the current run is finished at the end.
        clock: the source of time.
        rng: chooses times and victims.
        say: called with a line after every run.
    """

    def __init__(
        self,
        folder: Path,
        report: Path,
        minutes: float,
        *,
        clock: Clock,
        rng: Rng,
        say: Callable[[str], object],
    ) -> None:
        self._folder, self._file, self._minutes = folder, report, minutes
        self._clock, self._rng, self._say = clock, rng, say
        before = orjson.loads(report.read_bytes()) if report.exists() else None
        self._runs = before["runs"] if before else 0
        self._minutes_before = before["minutes"] if before else 0.0
        self._report = FaultReport.from_json(before) if before else FaultReport()
        self._sampler: UsageSampler | None = None
        self._started_us = clock.monotonic_us()

    @property
    def _elapsed_us(self) -> int:
        return self._clock.monotonic_us() - self._started_us

    def run(self) -> bool:
        """Run the soak; returns whether every promise held."""
        with ExitStack() as held:
            ensemble = held.enter_context(Ensemble(self._folder / "zookeeper", self._clock))
            nest = held.enter_context(Nest())
            server = held.enter_context(S3Server(self._clock))
            proxy = held.enter_context(S3Proxy(server.port, self._clock))
            # Its own ensemble, without faults: only the worker's memory is of interest.
            calm = EmbeddedZooKeeper(self._folder / "calm", self._clock, self._rng, is_open=True)
            held.callback(calm.close)
            steady = self._steady(nest, calm.start_or_join())
            self._sampler = held.enter_context(UsageSampler(steady.usage, self._clock, _SAMPLE_EVERY_MS))
            while self._elapsed_us < self._minutes * _MINUTE_US:
                self._one_run(ensemble, nest, server, proxy)
                self.write()
            if not steady.is_alive:
                self._report.violation("the steady worker has ended")
        takeover_s = self._report.recovery_s(0.99, "R6")
        if takeover_s is not None and takeover_s > _TAKEOVER_BOUND_S:
            self._report.violation(f"takeover p99 is {takeover_s} s, above {_TAKEOVER_BOUND_S} s")
        self.write()
        return not self._report.violations

    def _steady(self, nest: Nest, hosts: str) -> Worker:
        folder = self._folder / "steady"
        return nest.hatch(
            WorkerOptions(
                name="steady",
                path=str(folder / "pond"),
                history=folder / "history",
                hosts=hosts,
                session_timeout_ms=30_000,
                pace_ms=20.0,
                retention=_STEADY_RETENTION,
                id_slack=_STEADY_ID_SLACK,
                kept=_STEADY_KEPT,
            )
        )

    def _one_run(self, ensemble: Ensemble, nest: Nest, server: S3Server, proxy: S3Proxy) -> None:
        ensemble.start()
        folder = self._folder / f"run-{self._runs}"
        report = FaultReport()
        ground = Ground(
            folder=folder,
            ensemble=ensemble,
            nest=nest,
            clock=self._clock,
            rng=self._rng,
            report=report,
            options={"session_timeout_ms": _SESSION_MS},
        )
        scenarios = self._scenarios(server, proxy)
        name, scenario = scenarios[self._runs % len(scenarios)]
        scenario(ground)
        settle(ground)
        if not ground.url:
            flipped_bits(ground, 200)
        self._report.add(report)
        self._runs += 1
        self._tell(name, report)
        if not report.violations:
            # The store of a violation is kept for diagnosis.
            shutil.rmtree(folder)

    def _scenarios(self, server: S3Server, proxy: S3Proxy) -> Sequence[tuple[str, Callable[[Ground], None]]]:
        def on_s3(scenario: Callable[[Ground], None], *, through_proxy: bool) -> Callable[[Ground], None]:
            def run(ground: Ground) -> None:
                bucket = server.make_bucket(self._rng.token())
                ground.url = f"s3://{bucket}/pond"
                ground.storage_options = s3_options(proxy.address) if through_proxy else server.options
                scenario(ground)

            return run

        return (
            ("random kills", lambda ground: random_kills(ground, 60)),
            ("stopped owners", lambda ground: stopped_owners(ground, 8)),
            ("random kills on S3", on_s3(lambda ground: random_kills(ground, 40), through_proxy=False)),
            ("ends at failpoints", lambda ground: exits_at_failpoints(ground, IN_A_LEDGER)),
            ("stormy S3", on_s3(lambda ground: stormy_store(ground, 10, proxy), through_proxy=True)),
            ("lost members", lambda ground: lost_members(ground, 8)),
            ("lost quorum", lambda ground: lost_quorum(ground, times=1, away_ms=30_000)),
        )

    def _tell(self, name: str, report: FaultReport) -> None:
        counts = ", ".join(
            f"{row} {counts_of_row['trials']}" for row, counts_of_row in report.to_json()["faults"].items()
        )
        minutes = self._elapsed_us / _MINUTE_US
        verdict = f"{len(report.violations)} VIOLATIONS" if report.violations else "0 violations"
        self._say(f"{minutes:6.1f} of {self._minutes:g} min  run {self._runs}  {name}: {counts}; {verdict}")
        for text in report.violations:
            self._say(f"    {text}")

    def write(self) -> None:
        """Write the present report."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        samples = self._sampler.samples if self._sampler is not None else ()
        slopes = {
            name: slope_per_hour(
                [(seconds, getattr(usage, name)) for seconds, usage in samples], warm_up_s=_WARM_UP_S
            )
            for name in ("memory_mib", "threads", "descriptors")
        }
        figures: dict[str, Any] = {
            "runs": self._runs,
            "minutes": round(self._minutes_before + self._elapsed_us / _MINUTE_US, 2),
            **self._report.to_json(),
            "takeover_bound_s": _TAKEOVER_BOUND_S,
            "memory_slope_mib_per_hour": slopes["memory_mib"],
            "threads_slope_per_hour": slopes["threads"],
            "descriptors_slope_per_hour": slopes["descriptors"],
            "steady": [{"seconds": round(seconds, 1), **asdict(usage)} for seconds, usage in samples],
        }
        self._file.write_bytes(orjson.dumps(figures, option=orjson.OPT_INDENT_2))


def _end(number: int, _frame: object) -> None:
    # Raising stops servers and workers on the way out, as Ctrl-C does.
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@click.command()
@click.option("--minutes", type=float, default=30.0, show_default=True, help="How long.")
@click.option(
    "--report", type=click.Path(path_type=Path), default=Path("build/soak/report.json"), show_default=True
)
@click.option("--fresh", is_flag=True, help="Start a new report instead of continuing an existing one.")
def main(minutes: float, report: Path, *, fresh: bool) -> None:
    """Kill, stop, cut off and damage for a given time, and report every broken promise."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    if fresh:
        report.unlink(missing_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=report.with_suffix(".log"), level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="millpond-soak-", ignore_cleanup_errors=True) as folder:
        clock, rng = SystemClock(), SystemRng()
        sound = Soak(Path(folder), report, minutes, clock=clock, rng=rng, say=_say).run()
    for line in FaultReport.from_json(orjson.loads(report.read_bytes())).lines():
        _say(line)
    _say(f"report: {report}")
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
