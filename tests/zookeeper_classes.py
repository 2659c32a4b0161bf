"""An archive of the classes that ZooKeeper servers load, already parsed and verified, for the next JVM to map.

Tests start more than a hundred servers: alone, in ensembles, and secured. ``make test`` runs this module
once before; without the archive, or with another Java's, tests are only slower.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from kazoo.client import KazooClient

from millpond.statestore.leases.zookeeper_process import (
    OPTIONS_VARIABLE,
    class_path,
    find_jars,
    find_java,
    recorded_server,
)
from millpond.statestore.leases.zookeeper_server import EmbeddedZooKeeper
from millpond.statestore.store import Store
from millpond.statestore.system import SystemClock, SystemRng
from millpond.testing.servers.secured_zookeeper import SecuredZooKeeper
from millpond.testing.servers.zookeeper import Ensemble
from tests.short_lived import PLAIN_JAVA, ZOOKEEPER_CLASSES
from tests.tidy import ROOT

CLOCK: Final = SystemClock()


def archive(file: Path) -> None:
    """Write the archive; an incomplete archive never has its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[OPTIONS_VARIABLE] = f'-XX:DumpLoadedClassList="{folder}/%p.classes" -Xlog:disable'
        _serve_alone(folder / "alone")
        _serve_together(folder / "ensemble")
        _serve_secured(folder / "secured")
        lines = [line for part in folder.glob("*.classes") for line in part.read_text().splitlines()]
        names = folder / "classes"
        names.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)))
        options = (f"-XX:SharedClassListFile={names}", f"-XX:SharedArchiveFile={unfinished}", "-Xlog:disable")
        command = [find_java(), "-Xshare:dump", *PLAIN_JAVA.split(), *options, "-cp", class_path(find_jars())]
        subprocess.run(command, check=True)
    unfinished.replace(file)


def _serve_alone(folder: Path) -> None:
    server = EmbeddedZooKeeper(folder, CLOCK, SystemRng(), is_open=True)
    _use(server.start_or_join())
    server.close()


def _serve_together(folder: Path) -> None:
    with Ensemble(folder, CLOCK) as ensemble:
        _use(ensemble.hosts)
        # Servers write their lists as they end, unless they are killed.
        for place in folder.iterdir():
            _stop(place)


def _serve_secured(folder: Path) -> None:
    with SecuredZooKeeper(folder, CLOCK, {"shop": "a secret"}) as server:
        Store.open(folder / "pond", server.hosts, zookeeper_security=server.security_of("shop")).close()
        _stop(folder)


def _use(hosts: str) -> None:
    client = KazooClient(hosts)
    client.start()
    client.create("/lease", ephemeral=True, sequence=True)
    client.get_children("/")
    client.stop()
    client.close()


def _stop(folder: Path) -> None:
    server = recorded_server(folder)
    if server is not None:
        server.stop(CLOCK)


if __name__ == "__main__":
    archive(ZOOKEEPER_CLASSES)
    print(f"{ZOOKEEPER_CLASSES.stat().st_size >> 20} MiB of classes in {ZOOKEEPER_CLASSES.relative_to(ROOT)}")
