"""The Spark session with the settings and jars of Millpond and Delta, and the errors of calls to Spark.

Sessions and frames of Spark Connect are refused, because the engine needs Spark's JVM in this process. The module of
their class identifies them, so that Spark Connect's packages need not be installed.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millpond.executor.spark.jars import check_jars, files_in
from millpond.statestore import errors
from millpond.statestore.errors import InvalidError, MillpondError, UnavailableError
from millpond.statestore.leases.zookeeper_process import java_of_spark, refuse_old_java
from millpond.statestore.objects.hadoop import (
    S3_SCHEMES,
    S3A_FILE_SYSTEM,
    hadoop_properties,
    scheme_of,
    unreachable,
)
from millpond.statestore.visible import options_without_secrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_MODULE: Final = "pyspark.sql.connect"
INSTEAD: Final = (
    "run the job where Spark's driver is, with a classic session such as SparkSession.builder.master(…) makes, or give "
    "the rows to a LocalRunner, which takes frames of Spark Connect"
)


def refuse_connect(given: object, **details: object) -> None:
    """Raise if a session or frame is one of Spark Connect. ``details`` name its place in the error."""
    module = type(given).__module__
    if module == _MODULE or module.startswith(f"{_MODULE}."):
        raise InvalidError(
            f"this does not run on Spark Connect: {INSTEAD}",
            type=f"{module}.{type(given).__name__}",
            **details,
        )


def asks_for_connect(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """Return the setting that would make a new session one of Spark Connect, if any."""
    wanted = {
        "spark.remote": options.get("spark.remote"),
        "SPARK_REMOTE": environment.get("SPARK_REMOTE"),
        "SPARK_CONNECT_MODE_ENABLED": environment.get("SPARK_CONNECT_MODE_ENABLED"),
    }
    mode = options.get("spark.api.mode", environment.get("SPARK_API_MODE", ""))
    if mode.lower() == "connect":
        wanted["spark.api.mode" if "spark.api.mode" in options else "SPARK_API_MODE"] = mode
    return next((name for name, value in wanted.items() if value), None)


CHECKPOINT_MANAGER = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
)
"""
Without Hadoop's native library, Spark's default manager for local paths forks a process for each file's permissions,
170 ms a micro-batch.
"""

_ABORTABLE_MANAGER: Final = "org.apache.spark.internal.io.cloud.AbortableStreamBasedCheckpointFileManager"
"""It puts each file of a checkpoint on S3 once, where others copy it from a temporary name. In Spark's hadoop-cloud."""

_LOG: Final = logging.getLogger("millpond")

DAEMON: Final = "millpond.executor.spark.daemon"
"""The module that forks the Python workers of a local session, after their imports."""

_PACKAGES: Final = "spark.jars.packages"
_EXCLUDES: Final = "spark.jars.excludes"
_JARS: Final = "spark.jars"
_EXTENSIONS: Final = "spark.sql.extensions"
_CATALOG: Final = "spark.sql.catalog.spark_catalog"
_LISTS: Final = frozenset({_PACKAGES, _JARS, _EXTENSIONS})
_DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"

_FAST_FAILURE: Final = {"fs.s3a.attempts.maximum": "2", "fs.s3a.retry.limit": "2"}
"""Properties of a first look: with their defaults, a wrong endpoint takes minutes to fail."""

_LOCAL_IP: Final = "SPARK_LOCAL_IP"
_ADDRESSES: Final = frozenset({"spark.driver.bindAddress", "spark.driver.host"})

_DELTA: Final = re.compile(
    r"(?:^io\.delta:|/|^)delta-spark(?:_[\d.]+)*[-:](?P<version>\d[\w.-]*?)(?:\.jar)?$"
)
"""Delta's jar, as a package or a file."""

_AWS_SDK: Final = "2.35.4"
S3_PACKAGES: Final = (
    "org.apache.hadoop:hadoop-aws:3.5.0",
    f"software.amazon.awssdk:s3:{_AWS_SDK}",
    f"software.amazon.awssdk:s3-transfer-manager:{_AWS_SDK}",
    f"software.amazon.awssdk:sts:{_AWS_SDK}",
    f"software.amazon.awssdk:apache-client:{_AWS_SDK}",
    f"software.amazon.awssdk:netty-nio-client:{_AWS_SDK}",
)
"""Hadoop's S3A in the version of Spark's Hadoop, and the parts of Amazon's SDK that it calls."""

S3_EXCLUDES: Final = (
    "software.amazon.awssdk:bundle",
    "org.wildfly.openssl:wildfly-openssl",
    "io.netty:*",
    "org.apache.httpcomponents:*",
    "commons-codec:*",
)
"""The SDK as one jar of 600 MiB, OpenSSL for Java, and what Spark has itself."""

_REDACTED: Final = "(?i)secret|password|token|access[.]?key|encryption[.]key"
"""The names of settings whose values Spark hides in its web pages and logs: Spark's own, and S3A's."""

_SPARK_MIN: Final = (4, 2)
_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)")
_CORE_JAR: Final = re.compile(r"spark-core_[\d.]+-(?P<version>\d.*)\.jar")


def spark_session(
    application: str = "millpond",
    *,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
    store: str | Path | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the active Spark session, or a new one with Delta Lake's jars and fast local checkpoints.

    Ivy resolves the jars, which takes some seconds and, the first time, the network. Jars in ``$SPARK_HOME/jars`` are
    used instead where they exist. A Spark of one machine listens on the loopback interface only, its web pages too;
    ``SPARK_LOCAL_IP`` or ``spark.driver.bindAddress`` names another address.

    Args:
        application: the new session's name.
        master: Spark's master. ``None`` uses Spark's own configuration, or ``local[*]``.
        options: further Spark settings, which win over Millpond's. ``spark.jars.packages`` and ``spark.sql.extensions``
            are added to Delta's. Your Delta jar, as a package or in ``spark.jars``, replaces the jar of the Python
            package. A warning names both versions if they differ. Without Delta's ``spark.sql.catalog.spark_catalog``,
            SQL does not find Delta's tables by name.
        store: the store that the session is for. With an ``s3://`` URL the session also gets Hadoop's S3A, for inputs,
            checkpoints and tables under ``s3://`` and ``s3a://``: its jars are resolved like Delta's, unless Spark or
            ``options`` have it. For other object stores, give their connector in ``options``.
        storage_options: the store's credentials and endpoint, as for `Store.open`; missing ones come from the
            environment. They become S3A's properties for all buckets, after Spark has started, so that no command line
            has secrets. ``spark.hadoop.fs.s3a.…`` in ``options`` wins over them.

    Returns:
        An active session is returned unchanged, and a warning names the ``options`` and properties that it lacks.

    Raises:
        InvalidError: the session is, or would be, one of Spark Connect, its Spark and the Python package have
            different versions, or a storage option has no counterpart in S3A.
        UnavailableError: there is no Java that Spark could start, or it is too old.

    Example::

        mp.spark_session(options={"spark.jars.packages": "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"})
        mp.spark_session(store="s3://bucket/pond", storage_options={"aws_region": "eu-central-1"})
    """
    # Otherwise workers start the first `python3` on the path, which may lack our packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    given = dict(options or {})
    active = SparkSession.getActiveSession()
    refuse_connect(active)
    if (setting := asks_for_connect(given, os.environ if active is None else {})) is not None:
        raise InvalidError(f"this does not run on Spark Connect: {INSTEAD}", setting=setting)
    properties = {
        name: value
        for name, value in _properties_for(store, storage_options or {}).items()
        if f"spark.hadoop.{name}" not in given
    }
    if active is not None:
        _warn_of_missing(active, given, properties)
        return active
    builder = session_builder(application, master, given, for_s3=scheme_of(store) in S3_SCHEMES)
    with _on_loopback(given.get("spark.master") or master or os.environ.get("MASTER", "local[*]"), given):
        spark = _made(builder)
    if properties:
        _set_up_s3(spark, properties, str(store))
    return spark


def _set_up_s3(spark: SparkSession, properties: Mapping[str, str], store: str) -> None:
    configuration = _hadoop_configuration(spark)
    for name, value in properties.items():
        configuration.set(name, value)
    with _hadoop_errors(store):
        # A JVM that spark-submit has started has only the jars that spark-submit was told.
        configuration.getClassByName(S3A_FILE_SYSTEM)


def _properties_for(store: str | Path | None, storage_options: Mapping[str, str]) -> dict[str, str]:
    if scheme_of(store) in S3_SCHEMES:
        return hadoop_properties(str(store), storage_options, os.environ)
    if storage_options and scheme_of(store):
        _LOG.warning(
            "storage options reach Spark for s3:// only: give the connector of this store and its properties in the "
            "session's options store=`%s`",
            store,
        )
    return {}


def _hadoop_configuration(spark: SparkSession) -> Any:
    """Return the Hadoop properties of all queries of a session, which Spark sends to its executors."""
    context: Any = spark.sparkContext._jsc  # noqa: SLF001 - the only way to properties after the start
    return context.hadoopConfiguration()


def check_reach(spark: SparkSession, place: str) -> None:
    """Make a folder of an object store with Spark's JVM, or raise `InvalidError` with the settings that it lacks."""
    if not scheme_of(place):
        return
    session: Any = spark
    jvm = session._jvm  # noqa: SLF001 - Spark has no public call for any of this
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    for name, value in _FAST_FAILURE.items():
        configuration.set(name, value)
    path = jvm.org.apache.hadoop.fs.Path(place)
    # Not the cached file system, whose settings all later calls would have.
    connect = jvm.org.apache.hadoop.fs.FileSystem.newInstance
    with _hadoop_errors(place), closing(connect(path.toUri(), configuration)) as system:
        system.mkdirs(path)


@contextmanager
def _hadoop_errors(place: str) -> Iterator[None]:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        raise unreachable(error, place) from error


def session_builder(
    application: str,
    master: str | None,
    options: Mapping[str, str],
    *,
    has_delta: bool | None = None,
    for_s3: bool = False,
) -> SparkSession.Builder:
    """Return the builder of a new session; see `spark_session`. ``has_delta=None`` looks for Delta's jars in Spark's."""
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    master = master or os.environ.get("MASTER", "local[*]")
    asked_master = options.get("spark.master", master)
    # Spark starts workers with ``python -m``, for which a ``json.py`` of the current folder comes before Python's own.
    imports_from_here = {"", str(Path.cwd())} & set(sys.path)
    is_safe_path = is_one_machine(asked_master) and not imports_from_here
    packages, jars = _listed(options.get(_PACKAGES)), _listed(options.get(_JARS))
    manager = CHECKPOINT_MANAGER
    if for_s3 and _has_jar(_HADOOP_CLOUD, [*packages, *jars]):
        manager = _ABORTABLE_MANAGER
    settings = {
        _CATALOG: _DELTA_CATALOG,
        "spark.sql.streaming.checkpointFileManagerClass": manager,
        "spark.databricks.delta.snapshotPartitions": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        **({"spark.executorEnv.PYTHONSAFEPATH": "1"} if is_safe_path else {}),
        **daemon_settings(asked_master, os.environ),
        **({"spark.redaction.regex": _REDACTED} if for_s3 else {}),
        **options,
    }
    extensions = dict.fromkeys([_DELTA_EXTENSION, *_listed(options.get(_EXTENSIONS))])
    settings[_EXTENSIONS] = ",".join(extensions)
    if settings[_CATALOG] != _DELTA_CATALOG:
        _LOG.warning(
            "the session's catalog is not Delta's, as the options say: SQL does not find Delta's tables by their "
            "names %s=`%s`",
            _CATALOG,
            settings[_CATALOG],
        )
    settings.pop(_PACKAGES, None)
    has_own_delta = _brings_delta([*packages, *jars])
    if for_s3 and not _has_jar(_HADOOP_AWS, [*packages, *jars]):
        packages += S3_PACKAGES
        settings[_EXCLUDES] = ",".join([*_listed(options.get(_EXCLUDES)), *S3_EXCLUDES])
    builder = SparkSession.builder.appName(application).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    if not has_own_delta and not (spark_has_delta() if has_delta is None else has_delta):
        return configure_spark_with_delta_pip(builder, packages)
    return builder.config(_PACKAGES, ",".join(packages)) if packages else builder


@contextmanager
def _on_loopback(master: str, options: Mapping[str, str]) -> Iterator[None]:
    """Start a Spark of one machine on the loopback interface, unless the program names an address.

    Otherwise Spark opens its ports on all interfaces, and its web pages, which have no password, show queries and
    settings to the network. Only this variable of the environment decides where the pages are.
    """
    if not is_one_machine(master) or _LOCAL_IP in os.environ or not _ADDRESSES.isdisjoint(options):
        yield
        return
    os.environ[_LOCAL_IP] = "127.0.0.1"
    try:
        yield
    finally:
        del os.environ[_LOCAL_IP]


def _made(builder: SparkSession.Builder) -> SparkSession:
    from pyspark.errors import PySparkException

    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return builder.getOrCreate()  # in the JVM that spark-submit has started
    check_home()
    java = java_of_spark()
    try:
        spark = builder.getOrCreate()
    except PySparkException as error:
        if "JAVA_GATEWAY_EXITED" in str(error):
            refuse_old_java(java)
        raise
    try:
        check_jars(files_in(spark.sparkContext.getConf().get("spark.jars", "")))
    except MillpondError:
        spark.stop()
        raise
    return spark


def _brings_delta(jars: Iterable[str]) -> bool:
    """Return True if Delta's jar is among packages and files. Warn if its version is not the Python package's."""
    for jar in jars:
        if (found := _DELTA.search(jar)) is not None:
            if found["version"] != version("delta-spark"):
                _LOG.warning(
                    "Delta's jar is taken from the options, in another version than that of its Python package "
                    "jar=`%s` delta-spark=`%s`",
                    jar,
                    version("delta-spark"),
                )
            return True
    return False


_HADOOP_AWS: Final = re.compile(r"(?:^|[:/_])hadoop-aws[-:]")
_HADOOP_CLOUD: Final = re.compile(r"(?:^|[:/_])spark-hadoop-cloud_")


def _has_jar(name: re.Pattern[str], given: Iterable[str]) -> bool:
    """Return True if a jar is among packages and files, or in the Spark installation."""
    return any(map(name.search, [*given, *(jar.name for jar in spark_jars())]))


def _listed(text: str | None) -> list[str]:
    return [part for part in map(str.strip, (text or "").split(",")) if part]


def _warn_of_missing(
    active: SparkSession, options: Mapping[str, str], properties: Mapping[str, str] | None = None
) -> None:
    missing: dict[str, object] = {}
    for name, value in options.items():
        known = active.conf.get(name, None)
        if name in _LISTS and set(_listed(value)) <= set(_listed(known)):
            continue
        if known != value:
            missing[name] = value
    if properties:
        configuration = _hadoop_configuration(active)
        lacking = (name for name, value in properties.items() if configuration.get(name) != value)
        missing |= {f"spark.hadoop.{name}": properties[name] for name in lacking}
    if missing:
        _LOG.warning(
            "a Spark session is active, and is taken as it is: it does not have these options; stop it, or give them "
            "to the program that makes it missing=`%s`",
            options_without_secrets(missing),
        )


def is_one_machine(master: str) -> bool:
    """Return True if a Spark master runs tasks on the driver's machine.

    Example:
        >>> [is_one_machine(master) for master in ("local", "local[2]", "spark://host:7077", "yarn")]
        [True, True, False, False]
    """
    return master.partition("[")[0] == "local"


def daemon_settings(
    master: str | None, environment: Mapping[str, str], platform: str = sys.platform
) -> dict[str, str]:
    """Return the settings that make `DAEMON` fork the Python workers, where it can find its imports and fork safely.

    There are none for a cluster, whose machines may get this package with the job, for a program that `spark-submit`
    started, for another interpreter, or for a package that is not installed. Outside of Linux some libraries do not
    survive a fork.
    """
    is_here = master is not None and is_one_machine(master)
    is_own = environment.get("PYSPARK_PYTHON") == sys.executable and "PYSPARK_GATEWAY_PORT" not in environment
    if not (is_here and is_own and platform == "linux"):
        return {}
    try:
        version("millpond")
    except PackageNotFoundError:
        return {}
    return {"spark.python.daemon.module": DAEMON}


def spark_has_delta() -> bool:
    """Return True if Delta's jars are in the Spark installation, so that none need be resolved."""
    return any(jar.match("delta-spark_*.jar") for jar in spark_jars())


def spark_jars() -> list[Path]:
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    return list(Path(home, "jars").glob("*.jar"))


def check_session(spark: SparkSession) -> None:
    """Raise if the session's Spark is too old, or has another version than the Python package."""
    _check(str(spark.version), "the session")


def check_home(environment: Mapping[str, str] = os.environ) -> None:
    """Check, like `check_session`, the Spark that a new session would start, in ``SPARK_HOME`` or the package."""
    home = environment.get("SPARK_HOME")
    jars = sorted(Path(home, "jars").glob("spark-core_*.jar")) if home else []
    found = next((match["version"] for jar in jars if (match := _CORE_JAR.fullmatch(jar.name))), None)
    _check(found, f"SPARK_HOME ({home})")


def _check(found: str | None, where: str) -> None:
    import pyspark

    package = pyspark.__version__
    if _numbers(package) < _SPARK_MIN:
        raise InvalidError(
            f"millpond needs spark {'.'.join(map(str, _SPARK_MIN))} or newer: install that version of pyspark",
            pyspark=package,
        )
    if found is not None and _numbers(found) != _numbers(package):
        raise InvalidError(
            f"the spark of {where} is of another version than the python package: take a spark of the package's version, "
            "or unset SPARK_HOME to take the one that the package has",
            spark=found,
            pyspark=package,
        )


def _numbers(version: str) -> tuple[int, int]:
    match = _NUMBERS.match(version)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


_OURS: Final = re.compile(r"^(?:\S*: )?millpond\.statestore\.errors\.(\w+): (.+)$", re.MULTILINE)
"""The last line of a worker's trace in Spark's error."""

_OTHER_PYTHON: Final = (
    re.compile(r"PYTHON_VERSION_MISMATCH\]? *(?P<reason>.*)"),
    re.compile(r"(?P<reason>Cannot run program .*)"),
    re.compile(
        r"(?P<reason>ModuleNotFoundError: No module named '(?:millpond|pyspark|pyarrow|cloudpickle)\b.*)"
    ),
)
"""Spark's errors where the workers' Python is not the driver's."""


@contextmanager
def spark_calls() -> Iterator[None]:
    """Turn an error of a call to Spark into an `UnavailableError` if Spark's JVM has ended."""
    try:
        yield
    except MillpondError:
        raise
    except Exception as error:
        # py4j's error differs from call to call, so ask the JVM itself.
        if not _has_ended():
            raise
        raise UnavailableError(
            "spark's jvm has ended (killed, or out of memory): start the program again, it goes on from the last commit"
        ) from error


@contextmanager
def worker_calls() -> Iterator[None]:
    """Turn an error of a Spark job into the error of its Python workers, if that is Millpond's or has a known remedy."""
    try:
        yield
    except MillpondError:
        raise
    except Exception as error:
        cause = _cause_in_worker(str(error))
        if cause is None:
            raise
        raise cause from error


def _cause_in_worker(text: str) -> MillpondError | None:
    for pattern in _OTHER_PYTHON:
        if (found := pattern.search(text)) is not None:
            return InvalidError(
                "spark's workers run another python than the driver, or one without millpond: set PYSPARK_PYTHON to one "
                "of the driver's version with the same packages, on every machine, before the session begins",
                PYSPARK_PYTHON=os.environ.get("PYSPARK_PYTHON"),
                reason=found["reason"].strip(),
            )
    found = _OURS.search(text)
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, MillpondError)):
        return None
    return kind(found[2])


def _has_ended() -> bool:
    from py4j.protocol import Py4JError
    from pyspark import SparkContext

    # A stopped context has no gateway, and Spark has no public name for it.
    gateway = SparkContext._gateway  # noqa: SLF001
    if gateway is None:
        return False
    try:
        gateway.jvm.System.nanoTime()
    except (Py4JError, OSError):
        return True
    return False
