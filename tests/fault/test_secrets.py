"""Secrets in successful and failing runs, with every logger at its most verbose level.

Each program is a process, so that all of its output is seen: prints, logs of any level, traces. Every file
that it leaves is searched too: table, catalog, notes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from millpond.statestore.system import SystemClock
from millpond.testing.servers.secured_zookeeper import SecuredZooKeeper

pytestmark = [pytest.mark.zookeeper, pytest.mark.fault]

SECRETS: Final = {
    "USER_S": "planted-password-of-the-user",
    "OTHER_S": "planted-password-that-is-wrong",
    "KEY_S": "planted-password-of-the-key",
    "STORAGE_S": "planted-secret-of-the-object-store",
    "CATALOG_S": "planted-password-of-the-catalog",
}
"""By environment variable, so that no line of a program, which a trace quotes, holds one."""

PROGRAM: Final = """
import logging, os, sys, traceback
from dataclasses import replace

logging.basicConfig(level=1, stream=sys.stderr, force=True)
for name in ("millpond", "millpond.statestore.leases.zookeeper_client", "kazoo", "sqlalchemy"):
    logging.getLogger(name).setLevel(1)

import millpond as mp

class Count(mp.Computation):
    def process_record(self, context, record):
        context.state.set(context.state.get(0) + 1)

class Broken(mp.Computation):
    def process_record(self, context, record):
        raise ValueError("the record is bad")

def pipeline(computation, name="counts", **options):
    made = mp.Pipeline(f"of-{name}")
    made.inject("clicks", key="k", at="at").apply(computation, name=name, **options)
    return made

def runner(**changes):
    given = {"zookeeper": hosts, "zookeeper_security": security, "storage_options": options}
    return mp.LocalRunner(path, **{**given, **changes})

secret = os.environ
path, hosts, ca, certificate = sys.argv[1:5]
options = {"aws_secret_access_key": secret["STORAGE_S"], "aws_access_key_id": "shop", "aws_region": "x"}
bucket = {**options, "aws_endpoint_url": "http://127.0.0.1:1", "aws_allow_http": "true", "timeout": "1s"}
security = mp.ZooKeeperSecurity(
    user="shop", password=secret["USER_S"], ca_file=ca,
    certificate_file=certificate, key_password=secret["KEY_S"],
)
rows = {"clicks": [{"k": "a", "at": 1}, {"k": "b", "at": 2}]}

def opened(zookeeper=hosts, at=path, security=security, **changes):
    return mp.Store.open(at, zookeeper, zookeeper_security=security, session_timeout="2s", **changes)

def show(*things):
    for thing in things:
        print(repr(thing), str(thing), [thing], getattr(thing, "__dict__", None))
"""

SUCCESS: Final = """
made = runner()
show(made, security, made._options)
print(made.run(pipeline(Count()), rows))
show(runner(dead_letter_limit=None).run(pipeline(Broken(), "letters"), rows))
with opened(read_only=True) as store:
    show(store.rows_view("counts").to_arrow().to_pylist())
with opened() as store:
    show(store.catalog, store.leases, store.committer)
"""

FAILURES: Final = {
    "code that raises": "runner().run(pipeline(Broken(), 'broken', on_error='stop'), rows)",
    "an unknown user": "runner(zookeeper_security=replace(security, user='stranger')).run(pipeline(Count()), rows)",
    "a wrong password": "opened(security=replace(security, password=secret['OTHER_S']))",
    "a wrong authority": "opened(security=replace(security, ca_file=certificate))",
    "a wrong password of the key": "opened(security=replace(security, key_password=secret['OTHER_S']))",
    "no ensemble named": "runner(zookeeper=None).run(pipeline(Count()), rows)",
    "no server": "opened('127.0.0.1:1')",
    "no object store": "opened(at='s3://bucket/pond', storage_options=bucket)",
    "an unknown storage option": "opened(at='s3://bucket/pond', storage_options={**bucket, 'aws_secret_acces_key': "
    "secret['STORAGE_S']})",
    "a wrong storage option": "opened(at='s3://bucket/pond', storage_options={**bucket, 'timeout': "
    "secret['STORAGE_S'] and 'soon'})",
    "no catalog": "opened(catalog=f'postgresql+psycopg://shop:{secret[\"CATALOG_S\"]}@127.0.0.1:1/db').catalog",
    "a catalog without a driver": "opened(catalog=f'oracle+none://shop:{secret[\"CATALOG_S\"]}@h/db').catalog",
    "no catalog's URL": "opened(catalog=f'shop:{secret[\"CATALOG_S\"]}@h/db').catalog",
    "a wrong grant": "mp.ZooKeeperSecurity(user='shop', password=secret['USER_S'], grants=('x',))",
    "half of the credentials": "mp.ZooKeeperSecurity(password=secret['USER_S'])",
}

ATTEMPT: Final = """
try:
    {failure}
except Exception as error:
    traceback.print_exc()
    show(error)
    print("as expected:", {name!r})
"""

REFUSED: Final = "does not accept this user with this password"
COMMAND: Final = "from millpond.cli.main import main; main()"
CALLS: Final = (("verify",), ("gc",), ("adopt", "--as", "moved"), ("repair", "--yes"))
ENDED: Final = "--- a command ended with "

COMMANDS: Final = f"""
import json, sys
from millpond.cli.main import main

for call in json.loads(sys.argv[1]):
    sys.argv[1:] = call
    try:
        main()
    except SystemExit as end:
        print("{ENDED}", end.code, sep="", file=sys.stderr, flush=True)
"""


@dataclass(frozen=True)
class Ground:
    """A secured server, and a folder for a store."""

    server: SecuredZooKeeper
    folder: Path
    certificate: Path

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
            cwd=self.folder,
            env={**os.environ, **environment},
        )

    def program(self, text: str) -> subprocess.CompletedProcess[str]:
        places = (self.server.hosts, str(self.server.authority.ca_file), str(self.certificate))
        return self.run("-c", PROGRAM + text, str(self.folder / "pond"), *places, **SECRETS)

    def commands(
        self, calls: Iterable[list[str]]
    ) -> tuple[subprocess.CompletedProcess[str], list[tuple[str, str]]]:
        """Call commands in turn in one process; return its output, and each command's end and message."""
        done = self.run("-c", COMMANDS, json.dumps(list(calls)))
        said, *ends = done.stderr.split(ENDED)
        found = []
        for end in ends:
            status, _, following = end.partition("\n")
            found.append((status, said))
            said = following
        return done, found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredZooKeeper]:
    users = {"shop": SECRETS["USER_S"]}
    folder = tmp_path_factory.mktemp("zk")
    with SecuredZooKeeper(folder, SystemClock(), users, client_certificates="want") as secured:
        yield secured


@pytest.fixture
def ground(tmp_path: Path, server: SecuredZooKeeper) -> Ground:
    folder = tmp_path / "work"
    folder.mkdir()
    return Ground(server, folder, server.authority.issue("shop", key_password=SECRETS["KEY_S"]))


def lines_with_secrets(texts: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: {line}"
        for name, text in texts.items()
        for line in text.splitlines()
        if any(secret in line for secret in SECRETS.values())
    ]


def leaked(ground: Ground, *runs: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines with a secret in prints, logs and files."""
    texts = {
        f"{name} {number}": text
        for number, run in enumerate(runs)
        for name, text in (("out", run.stdout), ("err", run.stderr))
    }
    files = {
        str(file): file.read_bytes().decode(errors="replace")
        for file in ground.folder.rglob("*")
        if file.is_file()
    }
    return lines_with_secrets(texts | files)


def test_runs_show_no_secret(ground: Ground) -> None:
    """One run succeeds, and the records of the other fail."""
    done = ground.program(SUCCESS)

    assert done.returncode == 0, done.stderr[-3_000:]
    assert "shop" in done.stdout
    assert "Connecting to" in done.stderr  # The client's log is complete.
    assert "session_passwd" not in done.stderr
    assert (ground.folder / "pond" / "catalog.sqlite").exists()
    assert leaked(ground, done) == []


def test_failures_show_no_secret(ground: Ground) -> None:
    """From a wrong password to a wrong URL, neither error nor trace holds a secret."""
    attempts = [ATTEMPT.format(failure=failure, name=name) for name, failure in FAILURES.items()]
    done = ground.program("".join(attempts))

    assert done.returncode == 0, done.stderr[-3_000:]
    assert [name for name in FAILURES if f"as expected: {name}\n" not in done.stdout] == []
    assert leaked(ground, done) == []


def test_commands_show_no_secret(ground: Ground) -> None:
    """Commands take an ensemble's security from a file or the environment."""
    assert ground.program("runner(upkeep=None).run(pipeline(Count()), rows)").returncode == 0
    good, bad = ground.server.authority.ca_file.parent / "good.toml", ground.folder.parent / "bad.toml"
    lines = f'user = "shop"\nca_file = "{ground.server.authority.ca_file}"\n'
    good.write_text(f'{lines}password = "{SECRETS["USER_S"]}"\n')
    bad.write_text(f'{lines}password = "{SECRETS["OTHER_S"]}"\n')
    wrong = {"MILLPOND_ZOOKEEPER_SECURITY": str(good), "MILLPOND_ZOOKEEPER_PASSWORD": SECRETS["OTHER_S"]}
    pond, hosts = str(ground.folder / "pond"), ("--zookeeper", ground.server.hosts)
    calls = [[*command, pond, *hosts] for command in CALLS]

    done, said = ground.commands([*call, "--zookeeper-security", str(good)] for call in calls)
    assert [end for end, _ in said] == ["0"] * len(calls), done.stderr
    assert "not checked" not in done.stderr
    refused, said = ground.commands([*call, "--zookeeper-security", str(bad)] for call in calls)
    assert len(said) == len(calls)
    for end, text in said:
        assert end == "1"
        assert REFUSED in text
    named = ground.run("-c", COMMAND, *calls[-1], MILLPOND_ZOOKEEPER_SECURITY=str(good))
    overridden = ground.run("-c", COMMAND, *calls[-1], **wrong)
    assert named.returncode == 0, named.stderr
    assert overridden.returncode == 1
    assert REFUSED in overridden.stderr
    assert leaked(ground, done, refused, named, overridden) == []


def test_search_finds_printed_logged_and_written_secrets(ground: Ground) -> None:
    done = ground.program(
        "print(secret['USER_S']); logging.info(secret['KEY_S']); open('note', 'w').write(secret['CATALOG_S'])"
    )

    assert len(leaked(ground, done)) == 3
