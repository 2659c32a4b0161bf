"""Millpond's Spark session, and the daemon that forks its workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import pyarrow as pa
import pytest

from millpond.executor.spark.daemon import MODULES
from millpond.executor.spark.session import (
    CHECKPOINT_MANAGER,
    DAEMON,
    S3_EXCLUDES,
    S3_PACKAGES,
    _on_loopback,
    _properties_for,
    _warn_of_missing,
    daemon_settings,
    session_builder,
    spark_has_delta,
    spark_session,
)
from tests.processes.tree import command_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN: Final = {"PYSPARK_PYTHON": sys.executable}
KAFKA: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
DELTA: Final = f"io.delta:delta-spark_4.2_2.13:{version('delta-spark')}"
EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
LOOKS: Final = "process long, command string, modules array<string>, threads long, frozen long, drawn double"


def test_deltas_jars_in_spark_home_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the session downloads them."""
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "delta-storage-4.4.0.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert not spark_has_delta()

    (jars / "delta-spark_4.2_2.13-4.4.0.jar").touch()
    assert spark_has_delta()

    monkeypatch.delenv("SPARK_HOME")
    assert not spark_has_delta()


def _settings(*, has_delta: bool = False, **options: str) -> dict[str, str]:
    """Return the settings of a new session; ``__`` in a name stands for a dot."""
    given = {name.replace("__", "."): value for name, value in options.items()}
    return dict(session_builder("a", "local[1]", given, has_delta=has_delta)._options)


@pytest.mark.parametrize(
    ("given", "has_delta", "packages"),
    [
        (None, False, [DELTA]),
        (None, True, None),
        (KAFKA, False, [DELTA, KAFKA]),
        (KAFKA, True, [KAFKA]),
        (f" {KAFKA} , a:b:1,", False, [DELTA, KAFKA, "a:b:1"]),
        (f"{KAFKA},{DELTA}", False, [KAFKA, DELTA]),
    ],
)
def test_users_packages_are_added_to_deltas(
    given: str | None, has_delta: bool, packages: list[str] | None
) -> None:
    """Delta's is named once, and not at all where its jars are installed."""
    options = {} if given is None else {"spark__jars__packages": given}
    found = _settings(has_delta=has_delta, **options).get("spark.jars.packages")

    assert (None if found is None else found.split(",")) == packages


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("spark__jars__packages", "io.delta:delta-spark_4.2_2.13:9.9.9"),
        ("spark__jars__packages", f"{KAFKA},io.delta:delta-spark_2.13:9.9.9"),
        ("spark__jars", "/opt/other.jar,/opt/delta-spark_4.2_2.13-9.9.9.jar"),
    ],
)
def test_users_delta_replaces_ours_with_a_version_warning(
    name: str, given: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be a package or a file; a file needs no network."""
    settings = _settings(**{name: given})

    assert settings[name.replace("__", ".")] == given
    assert DELTA not in settings.get("spark.jars.packages", "")
    [warning] = caplog.messages
    assert "9.9.9" in warning
    assert f"delta-spark=`{version('delta-spark')}`" in warning


def test_users_other_jars_do_not_replace_delta(caplog: pytest.LogCaptureFixture) -> None:
    """Delta's jar of the right version causes no warning."""
    own = f"/opt/delta-spark_4.2_2.13-{version('delta-spark')}.jar"

    assert _settings(spark__jars="/opt/other.jar")["spark.jars.packages"] == DELTA
    assert "spark.jars.packages" not in _settings(spark__jars=own)
    assert not caplog.messages


def _settings_for_s3(**options: str) -> dict[str, str]:
    given = {name.replace("__", "."): value for name, value in options.items()}
    return dict(session_builder("a", "local[1]", given, has_delta=True, for_s3=True)._options)


def test_session_for_s3_resolves_s3a_and_not_the_whole_sdk() -> None:
    settings = _settings_for_s3(spark__jars__packages=KAFKA, spark__jars__excludes="a:b")

    assert settings["spark.jars.packages"].split(",") == [KAFKA, *S3_PACKAGES]
    assert settings["spark.jars.excludes"].split(",") == ["a:b", *S3_EXCLUDES]
    assert "spark.jars.excludes" not in _settings()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("spark__jars__packages", "org.apache.hadoop:hadoop-aws:3.4.2"),
        ("spark__jars", "/opt/bundle.jar,/opt/hadoop-aws-3.4.2.jar"),
    ],
)
def test_users_s3a_replaces_ours(name: str, given: str) -> None:
    settings = _settings_for_s3(**{name: given})

    assert settings[name.replace("__", ".")] == given
    assert "software.amazon.awssdk" not in settings.get("spark.jars.packages", "")
    assert "spark.jars.excludes" not in settings


def test_checkpoint_manager_for_s3_is_the_one_without_copies_where_spark_has_it() -> None:
    manager = "spark.sql.streaming.checkpointFileManagerClass"
    cloud = "org.apache.spark:spark-hadoop-cloud_2.13:4.2.0"

    assert _settings_for_s3()[manager] == _settings()[manager] == CHECKPOINT_MANAGER
    assert _settings(spark__jars__packages=cloud)[manager] == CHECKPOINT_MANAGER
    abortable = _settings_for_s3(spark__jars__packages=cloud)[manager]
    assert abortable.endswith(".AbortableStreamBasedCheckpointFileManager")


def test_keys_of_encryption_are_hidden_in_sparks_pages() -> None:
    hidden = re.compile(_settings_for_s3()["spark.redaction.regex"])

    for name in ("access.key", "secret.key", "session.token", "encryption.key", "proxy.password"):
        assert hidden.search(f"fs.s3a.{name}")


def test_storage_options_of_other_stores_are_not_passed_silently(caplog: pytest.LogCaptureFixture) -> None:
    assert _properties_for("gs://bucket/pond", {"google_service_account": "a.json"}) == {}
    assert "reach Spark for s3:// only" in caplog.text
    caplog.clear()
    assert _properties_for("pond", {"timeout": "10s"}) == _properties_for(None, {}) == {}
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "extensions"),
    [
        (None, [EXTENSION]),
        ("a.B", [EXTENSION, "a.B"]),
        (f"a.B,{EXTENSION}", [EXTENSION, "a.B"]),
    ],
)
def test_users_extensions_are_added_to_deltas(given: str | None, extensions: list[str]) -> None:
    options = {} if given is None else {"spark__sql__extensions": given}

    assert _settings(**options)["spark.sql.extensions"].split(",") == extensions


def test_users_catalog_replaces_deltas_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Spark has only one session catalog."""
    assert _settings()["spark.sql.catalog.spark_catalog"].endswith("DeltaCatalog")
    assert not caplog.messages

    assert (
        _settings(spark__sql__catalog__spark_catalog="a.Catalog")["spark.sql.catalog.spark_catalog"]
        == "a.Catalog"
    )
    assert "names spark.sql.catalog.spark_catalog=`a.Catalog`" in caplog.text


def test_users_settings_override_millponds() -> None:
    settings = _settings(spark__sql__session__timeZone="Europe/Oslo", spark__master="local[7]")

    assert (settings["spark.sql.session.timeZone"], settings["spark.master"]) == ("Europe/Oslo", "local[7]")


@pytest.mark.spark
def test_active_session_is_reused_with_a_warning_of_missing_options(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    """Options that it already has cause no warning, so a program may ask twice."""
    # Another test of the process may have left its own session active.
    spark.createDataFrame([], "unused int")
    assert (
        spark_session(options={"spark.sql.shuffle.partitions": "2", "spark.sql.extensions": EXTENSION})
        is spark
    )
    assert not caplog.messages

    assert spark_session(options={"spark.jars.packages": KAFKA}) is spark
    [warning] = caplog.messages
    assert f"missing=`{{'spark.jars.packages': '{KAFKA}'}}`" in warning

    caplog.clear()
    options = {"aws_secret_access_key": "SECRET", "aws_region": "mars"}
    assert spark_session(store="s3://bucket/pond", storage_options=options) is spark
    [warning] = caplog.messages
    assert "'spark.hadoop.fs.s3a.endpoint.region': 'mars'" in warning
    assert "'spark.hadoop.fs.s3a.secret.key': '***'" in warning


@pytest.mark.parametrize(
    ("master", "environment", "platform"),
    [
        ("spark://host:7077", OWN, "linux"),
        ("yarn", OWN, "linux"),
        ("local-cluster[2,1,1024]", OWN, "linux"),
        (None, OWN, "linux"),
        ("local[2]", {"PYSPARK_PYTHON": "python3"}, "linux"),
        ("local[2]", OWN | {"PYSPARK_GATEWAY_PORT": "4040"}, "linux"),
        ("local[2]", OWN, "darwin"),
    ],
)
def test_pysparks_daemon_is_kept_outside_of_a_plain_local_session(
    master: str | None, environment: dict[str, str], platform: str
) -> None:
    """The session is on a cluster, of another interpreter, from ``spark-submit`` or not on Linux."""
    assert daemon_settings(master, environment, platform) == {}


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]"])
def test_local_session_on_linux_gets_our_daemon(master: str) -> None:
    """The daemon has imported the workers' modules."""
    assert daemon_settings(master, OWN, "linux") == {"spark.python.daemon.module": DAEMON}


def _look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    import gc
    import sys
    from pathlib import Path

    import numpy as np

    parent = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
    for batch in batches:
        look = {
            "process": os.getpid(),
            "command": command_of(int(parent)),
            "modules": list(sys.modules),
            "threads": len(list(Path(f"/proc/{parent}/task").iterdir())),
            "frozen": gc.get_freeze_count(),
            "drawn": float(np.random.random()),  # noqa: NPY002 - the generator that NumPy has made at import
        }
        yield pa.RecordBatch.from_pylist([look] * len(batch))


def _looks(spark: SparkSession) -> list[Any]:
    return spark.range(0, 2, 1, 2).mapInArrow(_look, LOOKS).collect()


def test_worker_starts_with_its_modules_imported(spark: SparkSession) -> None:
    """The garbage collector ignores the imported objects; forking needs a process with one thread."""
    for look in _looks(spark):
        assert DAEMON in look.command
        assert set(MODULES) <= set(look.modules)
        assert look.threads == 1
        assert look.frozen > 10_000


def test_local_spark_listens_on_loopback_only(spark: SparkSession) -> None:
    """Spark's web pages have no password."""
    with _on_loopback("local[2]", {}):
        assert os.environ["SPARK_LOCAL_IP"] == "127.0.0.1"
    for master, options in (("spark://h:7077", {}), ("local", {"spark.driver.bindAddress": "0.0.0.0"})):
        with _on_loopback(master, options):
            assert "SPARK_LOCAL_IP" not in os.environ
    assert spark.conf.get("spark.driver.host") in {"localhost", "127.0.0.1"}


def test_workers_import_from_the_current_folder_if_the_program_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safe = ("spark.executorEnv.PYTHONSAFEPATH", "1")
    assert safe not in _settings().items()
    monkeypatch.chdir(tmp_path)
    assert safe in _settings().items()
    monkeypatch.syspath_prepend("")
    assert safe not in _settings().items()


def test_warning_about_an_active_session_hides_secret_options(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Active:
        class conf:  # noqa: N801
            get = staticmethod(lambda _name, _default: None)

    _warn_of_missing(
        cast("SparkSession", Active()), {"spark.hadoop.fs.s3a.secret.key": "SECRET", "spark.x": "7"}
    )

    assert "SECRET" not in caplog.text
    assert "spark.hadoop.fs.s3a.secret.key" in caplog.text
    assert "'7'" in caplog.text


def test_workers_are_reused_and_generate_different_numbers(spark: SparkSession) -> None:
    """NumPy's generator is as old as the daemon, so each worker must seed it again."""
    first, second = _looks(spark), _looks(spark)

    assert {look.process for look in first} & {look.process for look in second}
    assert len({look.drawn for look in first + second}) == len(first + second)


@pytest.mark.parametrize(("thread", "module"), [("false", DAEMON), ("true", "pyspark.daemon")])
def test_daemon_with_a_thread_becomes_pysparks(thread: str, module: str) -> None:
    """Forking is unsafe once an import has started a thread."""
    environment = os.environ | {"JE_ARROW_MALLOC_CONF": f"background_thread:{thread}"}
    with subprocess.Popen(
        [sys.executable, "-m", DAEMON, "pyspark.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"OMP_NUM_THREADS": "1"},
    ) as daemon:
        assert daemon.stdout is not None
        port = int.from_bytes(daemon.stdout.read(4), "big")
        command = command_of(daemon.pid)
        daemon.communicate()

    assert port > 0
    assert f"-m {module} pyspark.worker" in command
