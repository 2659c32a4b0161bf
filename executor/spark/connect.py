"""Spark Connect: its sessions and frames have no JVM in this process, which the engine on Spark works with.

They are told by the module of their class, so that what Spark Connect needs need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

from millpond.statestore.errors import InvalidError, UnpicklableError

_MODULE: Final = "pyspark.sql.connect"
INSTEAD: Final = (
    "run the job where Spark's driver is, with a classic session such as SparkSession.builder.master(…) makes, or give "
    "the rows to a LocalRunner, which takes frames of Spark Connect"
)
"""What to do in its place, for an error."""


def refuse_connect(given: object, **details: object) -> None:
    """Refuse a session or frame of Spark Connect.

    Args:
        given: what the user has given.
        details: where, for the error.

    Raises:
        InvalidError: it is one.
    """
    module = type(given).__module__
    if module == _MODULE or module.startswith(f"{_MODULE}."):
        raise InvalidError(
            f"this does not run on Spark Connect: {INSTEAD}",
            type=f"{module}.{type(given).__name__}",
            **details,
        )


def refuse_pickle(what: str) -> NoReturn:
    """Refuse to pickle what works only here, as Spark Connect does with the function of ``foreachBatch``.

    Args:
        what: the object, in words.

    Raises:
        UnpicklableError: always.
    """
    raise UnpicklableError(
        f"{what} stays in its process, and Spark Connect would send it to the server: {INSTEAD}"
    )


def asks_for_connect(options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """The setting that has a new session be one of Spark Connect; ``None`` if there is none.

    Args:
        options: settings of the session.
        environment: this process's environment variables.
    """
    wanted = {
        "spark.remote": options.get("spark.remote"),
        "SPARK_REMOTE": environment.get("SPARK_REMOTE"),
        "SPARK_CONNECT_MODE_ENABLED": environment.get("SPARK_CONNECT_MODE_ENABLED"),
    }
    mode = options.get("spark.api.mode", environment.get("SPARK_API_MODE", ""))
    if mode.lower() == "connect":
        wanted["spark.api.mode" if "spark.api.mode" in options else "SPARK_API_MODE"] = mode
    return next((name for name, value in wanted.items() if value), None)
