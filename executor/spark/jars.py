"""Checksums of the jars that Spark resolves for Delta Lake and for Hadoop's S3A.

Ivy believes the repository that it asks, or a mirror of it. The digests here are of the jars that this version was
tested with; ``python -m millpond.cli.jars --s3 --pin`` writes them anew after an update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from millpond.statestore.errors import DataError

PINS: Final = Path(__file__).with_name("jars.sha256")
"""A line for each jar, as ``sha256sum`` writes them."""


def check_jars(jars: Iterable[Path], *, all_pinned: bool = False) -> None:
    """Raise `DataError` if a jar is not the pinned one of its name; with ``all_pinned`` also if it has no pin."""
    pins = read_pins()
    for jar in jars:
        pin = pins.get(jar.name)
        if pin is None and not all_pinned:
            continue
        found = digest_of(jar)
        if found != pin:
            raise DataError(
                "a jar is not the one that Millpond was tested with: remove it from Ivy's cache, check the Maven "
                "repository that it came from, and fetch it again",
                jar=jar,
                sha256=found,
                pinned=pin,
            )


def read_pins() -> dict[str, str]:
    pairs = (line.split() for line in PINS.read_text(encoding="ascii").splitlines())
    return {name: digest for digest, name in pairs}


def write_pins(jars: Iterable[Path]) -> None:
    lines = sorted((jar.name, digest_of(jar)) for jar in jars)
    PINS.write_text("".join(f"{digest}  {name}\n" for name, digest in lines), encoding="ascii")


def digest_of(jar: Path) -> str:
    with jar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(listed: str) -> list[Path]:
    """Return the files of this machine in Spark's list of jars."""
    jars = (jar.removeprefix("file://").removeprefix("file:") for jar in listed.split(","))
    return [Path(jar) for jar in jars if jar.startswith("/")]
