"""The ``java`` program that servers and Spark run on: where it is, and whether it is new enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Final

from millpond.statestore.errors import UnavailableError

JAVA_MIN: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
"""Java 8 calls itself 1.8."""

_ANSWER_S: Final = 20.0


def find_java(environment: Mapping[str, str] = os.environ) -> str:
    """The ``java`` program: of ``JAVA_HOME``, or on the path.

    Raises:
        UnavailableError: there is none.
    """
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else None
    java = java or shutil.which("java", path=environment.get("PATH", ""))
    if java is None:
        raise UnavailableError(
            f"no java found: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder, or name a running zookeeper",
            JAVA_HOME=home,
        )
    return java


def java_of_spark(environment: Mapping[str, str] = os.environ) -> str:
    """The ``java`` program that Spark starts, which does not look on the path if there is a ``JAVA_HOME``.

    Raises:
        UnavailableError: there is none.
    """
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin" if home else environment.get("PATH", ""))
    if java is None:
        raise UnavailableError(
            f"spark needs java, and finds none: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder",
            JAVA_HOME=home,
        )
    return java


def refuse_old_java(java: str) -> None:
    """Say so if what did not start was too old; costs a start of the program.

    Args:
        java: the program.

    Raises:
        UnavailableError: it is too old; nothing is raised if it is not, or does not tell its version.
    """
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own program
            [java, "-version"],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    found = _VERSION.search(answer.stderr + answer.stdout)
    if found is not None and int(found[1]) < JAVA_MIN:
        raise UnavailableError(
            f"this java is too old: install java {JAVA_MIN} or newer, and set JAVA_HOME to its folder",
            java=java,
            version=found[1],
        )
