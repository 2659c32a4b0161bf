"""Expensive fixtures, made once for a run: Spark, ZooKeeper, PostgreSQL and an S3 server.

They start only when a test asks for them, and stop at the end of the run.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import HealthCheck, settings

from millpond.executor.interval.row_update import PendingWork
from millpond.executor.ownership import ownership
from millpond.statestore.interval import Interval
from millpond.statestore.leases.zookeeper_process import OPTIONS_VARIABLE
from millpond.statestore.log.files import LiveFile
from millpond.statestore.types import Objects
from millpond.testing.faults.report import FaultReport
from tests.distribution import SPARK, Distribution, group_of, rank_of
from tests.short_lived import (
    COMPILED_PLANS,
    INTERPRETED_PLANS,
    SHORT_LIVED_JAVA,
    ZOOKEEPER_CLASSES,
    ZOOKEEPER_JAVA,
    spark_environment,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from xdist.remote import Producer

    from millpond.testing.servers.s3_server import S3Server
    from millpond.testing.servers.secured_zookeeper import SecuredZooKeeper
    from tests.servers.postgresql import PostgreSQL

settings.register_profile("dev", max_examples=30, stateful_step_count=30, deadline=None)
settings.register_profile(
    "ci",
    max_examples=200,
    stateful_step_count=75,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by the expensive fixtures it requests, so that ``-m "not spark"`` is exact.

    Long tests come first, so that no process is left with one at the end.
    """
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "spark" in names:
            item.add_marker(pytest.mark.spark)
        if "zookeeper_hosts" in names or "secured_zookeeper" in names:
            item.add_marker(pytest.mark.zookeeper)

    items.sort(key=rank_of)


def pytest_collection_finish() -> None:
    """Hide collected objects from the cycle collector: they live to the end, and scanning them is slow."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Distribution:
    """With ``-n``, distribute tests as `Distribution` does, in the order of collection."""
    config.option.loadscopereorder = False
    return Distribution(config, log)


@pytest.fixture(scope="session", autouse=True)
def recorded_work_is_checked() -> Iterator[None]:
    """Compare what commits have recorded of an interval with its rows, wherever a test's takeover scans them."""
    scan = ownership.scan_interval

    def checked(
        objects: Objects, interval: Interval, files: Sequence[LiveFile], percentiles: Collection[float] = ()
    ) -> PendingWork:
        found = scan(objects, interval, files, percentiles)
        assert ownership.recorded_work(interval, files, percentiles) in (None, found)
        return found

    with patch.object(ownership, "scan_interval", checked):
        yield


_FAULT_REPORT = pytest.StashKey[FaultReport]()
_FAULT_REPORT_FILE = Path("build/fault/report.json")


def pytest_configure(config: pytest.Config) -> None:
    """Create the report of this run's faults; have this process and its children start Spark and ZooKeeper fast."""
    config.stash[_FAULT_REPORT] = FaultReport()
    os.environ.update(spark_environment())
    # A JVM that misses its archive starts without any, even without Java's own.
    if ZOOKEEPER_CLASSES.exists():
        os.environ.setdefault(OPTIONS_VARIABLE, ZOOKEEPER_JAVA)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker process's counts to the process that prints them."""
    gc.unfreeze()
    handed: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if handed is not None:
        handed["faults"] = session.config.stash[_FAULT_REPORT].to_json()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a worker process; a crashed one has none."""
    faults = getattr(node, "workeroutput", {}).get("faults")
    if faults is not None:
        node.config.stash[_FAULT_REPORT].add(FaultReport.from_json(faults))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the report of this run's faults, and write it to ``build/fault/report.json``."""
    report = config.stash[_FAULT_REPORT]
    if report:
        file = config.rootpath / _FAULT_REPORT_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(report.to_json(), option=orjson.OPT_INDENT_2))
        terminalreporter.section(f"faults ({_FAULT_REPORT_FILE})")
        for line in report.lines():
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def fault_report(request: pytest.FixtureRequest) -> FaultReport:
    """The report in which tests count the faults they inject, and their results."""
    return request.config.stash[_FAULT_REPORT]


def _spark_options(folder: Path) -> dict[str, str]:
    return {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.driver.extraJavaOptions": f"{SHORT_LIVED_JAVA} -Dderby.system.home={folder / 'derby'}",
        "spark.ui.enabled": "false",
        **COMPILED_PLANS,
    }


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start one local Spark session with Delta per process; one or two processes have its users."""
    user = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
    assert group_of(request.config.rootpath, user) == SPARK, user
    from millpond.executor.spark.session import spark_session

    options = _spark_options(tmp_path_factory.mktemp("spark"))
    session = spark_session("millpond-tests", master="local[2]", options=options)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture
def spark_as_reader(spark: SparkSession) -> Iterator[SparkSession]:
    """The session with interpreted plans: tests of tables for other engines run each plan once."""
    for name, value in INTERPRETED_PLANS.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in COMPILED_PLANS.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="session")
def zookeeper_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The ``host:port`` of one embedded ZooKeeper server for the whole run."""
    from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
    from millpond.statestore.system import SystemClock, SystemRng

    server = EmbeddedZooKeeper(tmp_path_factory.mktemp("zookeeper"), SystemClock(), SystemRng(), is_open=True)
    yield server.start_or_join()
    server.close()


@pytest.fixture(scope="session")
def secured_zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredZooKeeper]:
    """One secured server for the whole run, with the users ``shop``, ``auditor`` and ``stranger``."""
    from millpond.statestore.system import SystemClock
    from millpond.testing.servers.secured_zookeeper import SecuredZooKeeper

    users = {name: f"the-secret-of-{name}" for name in ("shop", "auditor", "stranger")}
    with SecuredZooKeeper(tmp_path_factory.mktemp("secured"), SystemClock(), users) as server:
        yield server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """One PostgreSQL server on a Unix socket for the whole run."""
    from millpond.statestore.system import SystemClock
    from tests.servers.postgresql import PostgreSQL

    with PostgreSQL(SystemClock()) as server:
        yield server


@pytest.fixture
def postgresql_database(postgresql: PostgreSQL) -> str:
    """The address of an empty database for this test alone."""
    from millpond.statestore.system import SystemRng

    return postgresql.make_database(SystemRng().token())


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server on the loopback interface for the whole run."""
    from millpond.statestore.system import SystemClock
    from millpond.testing.servers.s3_server import S3Server

    with S3Server(SystemClock()) as server:
        yield server


@pytest.fixture
def s3_bucket(s3_server: S3Server) -> str:
    """The ``s3://`` URL of a bucket for this test alone."""
    from millpond.statestore.system import SystemRng

    return f"s3://{s3_server.make_bucket(SystemRng().token())}"
