"""Damage to the folder of a store, as left by bad disks, other programs and attackers.

Everything is drawn from a generator, so a seed determines its damage. Links lead out of the store to a
canary folder beside it, into a loop, or nowhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millpond.statestore.log import commit_file

_LINES_MAX: Final = 5_000
_COPIED_BYTES_MAX: Final = 1 << 30
ESCAPES: Final = "\x1b]0;owned\x07\x1b[2K\x9b31m\u202etext"
_DEEP: Final = re.compile(r'\\*"deep (\d+)\\*"')
_UNSEALED: Final = commit_file._UNSEALED


class Vandal:
    """Damages a store in ``pond``, with links to the folder ``canary``."""

    def __init__(self, rng: np.random.Generator, pond: Path, canary: Path) -> None:
        self._rng = rng
        self._pond = pond
        self._canary = canary
        self.deeds: list[str] = []

    def damage(self) -> list[str]:
        """Damage the store in one to three ways; return their descriptions."""
        for _ in range(int(self._rng.integers(1, 4))):
            name = self._one_of(list(_DEEDS))
            with suppress(OSError, ValueError, IndexError, RecursionError, sqlite3.Error, pa.ArrowException):
                detail = _DEEDS[name](self)
                self.deeds.append(f"{name}: {detail}")
        return self.deeds

    # -- choices -------------------------------------------------------------------------------

    def _one_of(self, given: list[Any]) -> Any:
        return given[int(self._rng.integers(len(given)))]

    def _file(self, under: str = "", suffix: str = "") -> Path:
        folder = self._pond / under
        found = [path for path in folder.rglob(f"*{suffix}") if path.is_file() and not path.is_symlink()]
        return self._one_of(sorted(found))

    def _path(self) -> Path:
        return self._one_of(sorted(self._pond.rglob("*")))

    def _commits(self) -> list[Path]:
        # Reading an earlier deed's link to a device, or its FIFO, would not end.
        found = (self._pond / "rows" / "_delta_log").glob("*.json")
        return sorted(path for path in found if path.is_file() and not path.is_symlink())

    def _value(self, former: object = None) -> Any:
        canary, rng = str(self._canary), self._rng
        deep = f"deep {int(rng.integers(1, 100_000))}"
        paths = [
            "../../canary/precious.txt",
            "computation=alarm/../../../canary/precious.txt",
            "%2e%2e/%2e%2e/canary/precious.txt",
            f"{canary}/precious.txt",
            f"file://{canary}/precious.txt",
            "s3://nowhere.invalid/file.parquet",
            "linked/precious.txt",
        ]
        others = [
            None,
            True,
            -1,
            0,
            7,
            2**31,
            2**63,
            -(2**70),
            10**400,
            1.5,
            1e308,
            float("nan"),
            float("inf"),
        ]
        texts = ["", "x", ESCAPES, "a\nb", "\ud800", "\0", "é" * 300, "x" * 100_000, "{}", "null", '"']
        kept = [[former], {"a": former}, str(former), [former] * 1_000]
        return self._one_of([*others, *texts, *paths, *paths, [], {}, deep, *kept])

    def _mutated(self, value: Any) -> Any:
        """Replace, drop, rename or add one part of a JSON value, at any depth."""
        if isinstance(value, dict) and value and self._rng.random() < 0.85:
            name = self._one_of(list(value))
            what = self._rng.random()
            if what < 0.65:
                return {**value, name: self._mutated(value[name])}
            if what < 0.8:
                return {key: kept for key, kept in value.items() if key != name}
            if what < 0.9:
                return {**value, name + "x": value[name]}
            return {**value, str(self._value())[:50]: self._value()}
        if isinstance(value, list) and value and self._rng.random() < 0.8:
            place = int(self._rng.integers(len(value)))
            return [*value[:place], self._mutated(value[place]), *value[place + 1 :]]
        if isinstance(value, str) and value[:1] in "{[" and self._rng.random() < 0.7:
            with suppress(ValueError):
                return dump_json(self._mutated(json.loads(value)))
        return self._value(value)

    # -- deeds ---------------------------------------------------------------------------------

    def _flip(self, path: Path) -> str:
        data = bytearray(path.read_bytes())
        for _ in range(int(self._rng.integers(1, 5))):
            data[int(self._rng.integers(len(data)))] ^= 1 << int(self._rng.integers(8))
        path.write_bytes(data)
        return self._name(path)

    def _cut(self, path: Path) -> str:
        data = path.read_bytes()
        path.write_bytes(data[: int(self._rng.integers(len(data)))])
        return self._name(path)

    def _stretch(self, path: Path) -> str:
        more = self._one_of(
            [b"\0" * 1_000_000, b"{}\n", b"\n", os.fsencode("\udcff"), b"x" * 5_000_000, b"[" * 100_000]
        )
        path.write_bytes(path.read_bytes() + more)
        return self._name(path)

    def _splice(self, path: Path) -> str:
        data = path.read_bytes()
        start, end = sorted(int(place) for place in self._rng.integers(0, len(data) + 1, 2))
        path.write_bytes(data[:start] + self._rng.bytes(int(self._rng.integers(0, 40))) + data[end:])
        return self._name(path)

    def _swap(self) -> str:
        one, other = self._file(), self._file()
        data = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{self._name(one)} {self._name(other)}"

    def _remove(self) -> str:
        path = self._path()
        clear(path)
        return self._name(path)

    def _link(self) -> str:
        path = self._path()
        target = self._one_of(
            [
                self._canary / "precious.txt",
                self._canary / "new.txt",
                self._canary / "places.sqlite",
                self._canary,
                self._canary / "folder",
                Path(),
                Path(".."),
                Path("nowhere"),
                path.name,
                Path("/dev/zero"),
                Path("/proc/self/mem"),
                Path("/proc/self/environ"),
            ]
        )
        clear(path)
        path.symlink_to(target)
        return f"{self._name(path)} -> {target}"

    def _link_in(self) -> str:
        folder = self._one_of(sorted({path.parent for path in self._pond.rglob("*")} | {self._pond}))
        name = self._one_of(["linked", "a", "computation=linked", "checkpoints", "sinks", "5", "_delta_log"])
        target = self._one_of([self._canary, self._canary / "folder", Path(), Path("../.."), "nowhere"])
        (folder / name).symlink_to(target)
        return f"{self._name(folder)}/{name} -> {target}"

    def _odd_file(self) -> str:
        path = self._path()
        kind = self._one_of(["fifo", "folder", "socket", "empty", "unreadable"])
        if kind == "unreadable":
            path.chmod(0)
            return f"{kind} {self._name(path)}"
        clear(path)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            os.mknod(path, 0o140600)
        else:
            path.write_bytes(b"")
        return f"{kind} {self._name(path)}"

    def _stranger(self) -> str:
        folder = self._one_of(sorted({path.parent for path in self._pond.rglob("*")} | {self._pond}))
        name = self._one_of(
            [
                b"\xff\xfe", b"a\nb", ESCAPES.encode(), b"x" * 255, b"computation=..", b"computation=%2e%2e%2fx",
                b"99999999999999999999.json", b"00000000000000000099.json", b"-1.json", b"_last_checkpoint",
                b"00000000000000000020.checkpoint.parquet", "00000000000000000\u0663.json".encode(), b"$(id)", b"'; --",
            ]
        )  # fmt: skip
        data = self._one_of([b"", b"{}", b"null", b"[]", b'{"version":1e99}', self._rng.bytes(100)])
        write_file(folder / os.fsdecode(name), data)
        return f"{self._name(folder)} {name!r}"

    def _edit_commit(self) -> str:
        path = self._one_of(self._commits())
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        place = int(self._rng.integers(len(lines)))
        lines[place] = self._mutated(lines[place])
        path.write_bytes(_lines(lines))
        return self._name(path)

    def _forge_history(self) -> str:
        """Change a commit and reseal it and all later ones, so that only their contents are wrong."""
        commits = self._commits()
        first = int(self._rng.integers(len(commits)))
        previous = ""
        for place, path in enumerate(commits[first:]):
            lines = [json.loads(line) for line in path.read_bytes().splitlines()]
            if place == 0:
                for _ in range(int(self._rng.integers(1, 3))):
                    row = int(self._rng.integers(len(lines)))
                    lines[row] = self._mutated(lines[row])
            data = _sealed(lines, previous if place else None)
            path.write_bytes(data)
            previous = commit_file.digest_of(data)
        for folder in ("high_water", "zookeeper"):
            clear(self._pond / folder)
        for checkpoint in self._pond.glob("rows/_delta_log/*checkpoint*"):
            checkpoint.unlink()
        return self._name(commits[first])

    def _foreign_commit(self) -> str:
        """Add a commit as of another engine, which Millpond must judge by its contents."""
        last = self._commits()[-1]
        hostile = str(self._value()) if self._rng.random() < 0.3 else "linked/precious.txt"
        add = {"path": hostile, "partitionValues": {"computation": "alarm"}, "size": 1, "modificationTime": 1}
        actions: list[Any] = [
            {"remove": {"path": hostile, "deletionTimestamp": 1, "dataChange": False, "size": 13}},
            {"add": {**add, "dataChange": bool(self._rng.random() < 0.5), "stats": "{}"}},
            {"txn": {"appId": "millpond/superstep/flights", "version": 2**62}},
            {"protocol": {"minReaderVersion": 9, "minWriterVersion": 99}},
            {"metaData": {"id": "x", "schemaString": "{}", "partitionColumns": []}},
            {"cdc": {"path": hostile}},
        ]
        chosen = [self._one_of(actions) for _ in range(int(self._rng.integers(1, 4)))]
        if self._rng.random() < 0.5:
            chosen = [self._mutated(action) for action in chosen]
        path = last.with_name(f"{int(last.stem) + 1:020}.json")
        write_file(path, _lines([{"commitInfo": {"timestamp": 1, "operation": "OPTIMIZE"}}, *chosen]))
        return f"{self._name(path)} {str(chosen)[:200]}"

    def _rewrite_parquet(self) -> str:
        """Replace a file of rows or a checkpoint by a valid file with other contents."""
        path = self._file(suffix=".parquet")
        table = pq.read_table(path, partitioning=None)
        what = self._one_of(["drop", "retype", "values", "empty", "more", "nothing"])
        name = self._one_of(table.column_names)
        if what == "drop":
            table = table.drop_columns([name])
        elif what == "retype":
            kind = self._one_of([pa.int64(), pa.string(), pa.binary(), pa.list_(pa.int8()), pa.null()])
            table = table.set_column(table.column_names.index(name), name, pa.nulls(table.num_rows, kind))
        elif what == "values":
            kind = table.schema.field(name).type
            cells = [self._cell(kind) for _ in range(table.num_rows)]
            table = table.set_column(table.column_names.index(name), name, pa.array(cells, kind))
        elif what == "empty":
            table = table.slice(0, 0)
        elif what == "more":
            copies = int(self._rng.integers(2, 2_000))
            # A bomb of an earlier deed is not written a thousand times.
            table = pa.concat_tables([table] * (copies if copies * table.nbytes < _COPIED_BYTES_MAX else 2))
        else:
            table = pa.table({})
        pq.write_table(table, path)
        return f"{what} {name} {self._name(path)}"

    def _cell(self, kind: pa.DataType) -> Any:
        if pa.types.is_string(kind):
            return self._one_of(["", ESCAPES, "[" * 5_000, '{"a":1e999}', "x" * 10_000, "../../canary", None])
        if pa.types.is_integer(kind):
            return self._one_of([0, -1, 127, None])
        if pa.types.is_timestamp(kind):
            return self._one_of([-(2**63), 2**63 - 1, 0, None])
        if pa.types.is_binary(kind):
            return self._one_of([b"", b"\x80\x04.", b"\xff" * 100, None])
        return None

    def _bomb(self) -> str:
        """Replace a file by a small file that expands when read."""
        path = self._file(suffix=".parquet")
        table = pq.read_table(path, partitioning=None).slice(0, 1)
        name = self._one_of([field.name for field in table.schema if pa.types.is_string(field.type)])
        rows = int(self._rng.integers(1, 300))
        big = pa.array(["x" * 1_000_000] * rows, pa.string())
        taken = table.take(pa.array([0] * rows))
        taken = taken.set_column(taken.column_names.index(name), name, big)
        pq.write_table(taken, path, compression="zstd", use_dictionary=True)
        return f"{rows} MB of {name} in {path.stat().st_size} bytes: {self._name(path)}"

    def _catalog(self) -> str:
        path = self._pond / "catalog.sqlite"
        with sqlite3.connect(path) as database:
            tables = [
                name for (name,) in database.execute("select name from sqlite_master where type = 'table'")
            ]
            table = self._one_of(tables)
            columns = [row[1] for row in database.execute(f'pragma table_info("{table}")')]
            column = self._one_of(columns)
            what = self._one_of(["trigger", "view", "drop", "value", "index", "version", "endless"])
            endless = "with recursive r(n) as (select 1 union all select n + 1 from r) select"
            statements = {
                "trigger": f'create trigger x after insert on "{table}" begin {endless} count(*) from r; end',
                "view": f'alter table "{table}" rename to hidden',
                "drop": f'drop table "{table}"',
                "value": f'update "{table}" set "{column}" = ?',
                "index": f'create unique index x on "{table}" ("{column}")',
                "version": f"pragma user_version = {int(self._rng.integers(2**31))}",
                "endless": f'alter table "{table}" rename to hidden',
            }
            value = self._value()
            given = (
                (str(value)[:10_000].encode("utf-8", "ignore").decode(),) if "?" in statements[what] else ()
            )
            database.execute(statements[what], given)
            if what == "view":
                database.execute(f'create view "{table}" as select * from hidden')
            if what == "endless":
                database.execute(f'create view "{table}" as {endless} n as "{column}" from r')
        database.close()
        return f"{what} {table}.{column}"

    def _server(self) -> str:
        """Name another process as the store's ZooKeeper, or change the contents of its files."""
        folder = self._pond / "zookeeper"
        folder.mkdir(exist_ok=True)
        name = self._one_of(["server.json", "zoo.cfg", "secret", "jaas.conf", "lock", "users", "running"])
        honest = {"pid": os.getppid(), "process_id": os.getppid(), "port": 22, "started": 0, "secured": True}
        text = self._one_of(
            [dump_json(self._mutated(honest)), dump_json(honest), "", "null", "dataDir=/tmp\n", "[" * 9_999]
        )
        write_file(folder / name, text_bytes(text))
        return f"{name} {text[:100]!r}"

    def _checkpoint(self) -> str:
        """Give the store checkpoints of Spark's queries with hostile contents."""
        folder = self._pond / "checkpoints" / self._one_of(["flights", "q", "%2e%2e", "linked"])
        (folder / "offsets").mkdir(parents=True, exist_ok=True)
        write_file(folder / "metadata", text_bytes(dump_json(self._mutated({"id": "q1"}))))
        for number in range(int(self._rng.integers(1, 6))):
            place = folder / self._one_of(["offsets", "commits"]) / str(number)
            place.parent.mkdir(exist_ok=True)
            if self._rng.random() < 0.3:
                place.symlink_to(self._one_of([self._canary / "new.txt", self._canary / "precious.txt"]))
            else:
                write_file(place, self._one_of([b"v1\n{}\n{}", b"v9\n", b"", b"v1\n" + b"[" * 9_999]))
        if self._rng.random() < 0.3:
            clear(folder / "commits")
            (folder / "commits").symlink_to(self._canary / "folder")
        return self._name(folder)

    def _marks(self) -> str:
        folder = self._pond / "high_water"
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if self._rng.random() < 0.5:
                path.unlink()
        version = self._one_of(["9" * 20, "0" * 20, "-1", "x"])
        name = f"{version}-{'0' * 64}-{self._one_of(['0' * 32, '', 'x' * 100])}"
        write_file(folder / name, b"")
        return name[:80]

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._pond))


def clear(path: Path) -> None:
    # `rmtree` itself would open a FIFO, and wait.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """Write a file; whatever an earlier deed left in its place would lead outside or wait."""
    if path.is_symlink() or not path.is_file():
        clear(path)
    path.write_bytes(data)


def text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def dump_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON, with nested brackets in place of their placeholders."""
    text = json.dumps(value, separators=(",", ":"), default=default)
    return _DEEP.sub(lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)


def _lines(lines: list[Any]) -> bytes:
    return text_bytes("".join(f"{dump_json(line)}\n" for line in lines))


def _sealed(lines: list[Any], previous: str | None) -> bytes:
    info = lines[0].get("commitInfo") if isinstance(lines[0], dict) else None
    fields = info.get("millpond") if isinstance(info, dict) else None
    if not isinstance(fields, dict):
        return _lines(lines)
    fields |= {"seal": _UNSEALED, "actions": len(lines)} | (
        {} if previous is None else {"previous": previous}
    )
    data = _lines(lines)
    return data.replace(
        f'"seal":"{_UNSEALED}"'.encode(), f'"seal":"{commit_file.digest_of(data)}"'.encode(), 1
    )


def _some(deed: Callable[[Vandal, Path], str], under: str = "", suffix: str = "") -> Callable[[Vandal], str]:
    return lambda vandal: deed(vandal, vandal._file(under, suffix))


_V: Final = Vandal
_DEEDS: Final[dict[str, Callable[[Vandal], str]]] = {
    **{f"flip {place}": _some(_V._flip, place) for place in ("", "rows", "rows/_delta_log", "zookeeper")},
    **{f"cut {place}": _some(_V._cut, place) for place in ("", "rows", "rows/_delta_log")},
    **{f"stretch {place}": _some(_V._stretch, place) for place in ("", "rows/_delta_log")},
    **{f"splice {place}": _some(_V._splice, place) for place in ("rows", "rows/_delta_log")},
    "flip catalog": lambda vandal: vandal._flip(vandal._pond / "catalog.sqlite"),
    "swap": _V._swap,
    "remove": _V._remove,
    **{f"link {number}": _V._link for number in range(3)},
    **{f"link in {number}": _V._link_in for number in range(2)},
    "odd file": _V._odd_file,
    "stranger": _V._stranger,
    **{f"edit commit {number}": _V._edit_commit for number in range(3)},
    **{f"forge history {number}": _V._forge_history for number in range(5)},
    **{f"foreign commit {number}": _V._foreign_commit for number in range(3)},
    **{f"rewrite parquet {number}": _V._rewrite_parquet for number in range(3)},
    "bomb": _V._bomb,
    **{f"catalog {number}": _V._catalog for number in range(2)},
    "server": _V._server,
    "checkpoint": _V._checkpoint,
    "marks": _V._marks,
}
