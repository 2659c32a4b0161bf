"""Control characters of keys, states and errors on a terminal."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

import millpond as mp

pytestmark = pytest.mark.slow

EVIL = "\x1b]0;owned\x07\x1b[2K\x9b31m\u202ekey\nforged"
RAW = (b"\x1b]0;", b"\x1b[2K", b"\xc2\x9b", "\u202e".encode(), b"\nforged")
CALLS = {
    "rows": ["rows", "pond", "c"],
    "rows as json": ["rows", "pond", "c", "--json"],
    "sql": ["sql", "pond", "select key, state from c"],
    "sql as json": ["sql", "pond", "select key from c", "--json"],
    "sql as csv": ["sql", "pond", "select key from c", "--format", "csv"],
    "error of sql": ["sql", "pond", "select error('' || (select key from c limit 1))"],
    "name of a column": ["sql", "pond", f'select 1 as "{EVIL}"'],
    "dead letters": ["dead-letters", "list", "pond"],
    "a dead letter": ["dead-letters", "show", "pond", "c/0000000001/000000"],
    "an unknown key": ["rows", "pond", "c", "--key", EVIL],
    "an unknown computation": ["rows", "pond", EVIL],
    "an unknown savepoint": ["rows", "pond", "c", "--version", EVIL],
    "an unknown store": ["status", EVIL],
    "savepoints": ["savepoint", "pond", "--list"],
    "history": ["history", "pond"],
    "intervals": ["intervals", "pond"],
    "status": ["status", "pond"],
}


class Count(mp.Computation):
    def process_record(self, context, record):
        if record.value["t"] == 1:
            raise ValueError(f"refused {context.key}")
        context.state.set({"text": EVIL})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, zookeeper_hosts: str) -> Path:
    folder = tmp_path_factory.mktemp("escapes")
    pipeline = mp.Pipeline("p")
    pipeline.inject("s", key="k", at="t", watermark=mp.BoundedDisorder("1s")).apply(Count(), name="c")
    runner = mp.LocalRunner(
        folder / "pond", zookeeper=zookeeper_hosts, dead_letter_limit=None, progress=False
    )
    runner.run(pipeline, {"s": [{"k": EVIL, "t": 0}, {"k": EVIL + "2", "t": 1}]})
    with mp.Store.open(folder / "pond", zookeeper=zookeeper_hosts) as store:
        store.savepoint(EVIL)
    return folder


def on_a_terminal(folder: Path, words: list[str]) -> bytes:
    code = f"import sys; sys.argv[1:] = {words!r}\nfrom millpond.cli.main import main; main()"
    process_id, descriptor = pty.fork()
    if process_id == 0:
        os.chdir(folder)
        os.execve(
            sys.executable,
            [sys.executable, "-P", "-c", code],
            {**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
        )
    seen = bytearray()
    try:
        while data := os.read(descriptor, 65536):
            seen += data
    except OSError:
        pass  # Linux reports the closed other end like this.
    os.waitpid(process_id, 0)
    os.close(descriptor)
    return bytes(seen)


@pytest.mark.parametrize("call", CALLS)
def test_terminal_gets_no_control_characters_of_data(folder: Path, call: str) -> None:
    seen = on_a_terminal(folder, CALLS[call])

    assert seen
    assert [raw for raw in RAW if raw in seen.replace(b"\r\n", b"\n")] == []
