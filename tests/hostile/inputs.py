"""Inputs as strangers hand them in: files and folders of rows, payloads, settings and checkpoints.

A `Forger` makes them in a folder next to an honest store, and names the commands that read them. Its damage to
files is the vandal's; what it adds are rows, columns, types, encodings and sizes that no honest program writes.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.hostile.damage import ESCAPES, Vandal, clear, dump_json, text_bytes, write_file

# A beginning, a part, how often it is repeated, and an end: made when they are used, because some are large.
_ODD_LINES: Final[tuple[tuple[bytes, bytes, int, bytes], ...]] = (
    *((text, b"", 0, b"") for text in (
        b'{"airport":"EWR","airport":"JFK","at":1,"id":1}', b'{"airport":"\\ud800","at":1,"id":1}', b"[{}]", b"[]",
        b'{"airport":"EWR","at":12345678901234567890,"id":1}', b'{"airport":"EWR","at":1e400,"id":1}', b"7", b'"x"',
        b'{"airport":"EWR","at":NaN}', b"\xff\xfe\0", b"\xef\xbb\xbf{}", b"\0", b"null", b"\x1b]0;owned\x07", b"\r",
        b"\xc2\x9b31m", "\u202e".encode(), b'{"__millpond_key":1}', b'{"airport":"EWR","at":"2024-13-45","id":true}',
        b'{"airport":"EWR","at":"now","id":[]}', b'{"airport":"EWR","at":true,"id":{}}', b'{"airport":["EWR"],"at":1.5}',
    )),
    *((b"", sign, 100_000, b"") for sign in (b"[", b"{", b'{"at":')),
    (b'{"airport":"EWR","at":1,"id":1', b"0", 400, b"}"),
    (b'{"airport":"EWR","at":"', b"9", 5_000, b'"}'),
    *((begin, b"x", 17_000_000, end) for begin, end in ((b"", b""), (b'"', b'"'), (b'{"airport":"', b'"}'))),
    *((b'{"airport":"EWR","at":1,"id":[', part, 1_000_000 * many, part[:-1] + b"]}")
      for part in (b"[],", b"{},", b'"",', b"1,") for many in (1, 4, 20)),
    *((b"[", part, 5_000_000, part[:-1] + b"]") for part in (b"[],", b"1,")),
    (b"{", b'"a":1,', 500_000, b'"b":1}'),
)  # fmt: skip

Commands: TypeAlias = list[tuple[str, ...]]

APPS: Final = """
import millpond as mp

_TREE = {"type": "record", "name": "Tree", "fields": [
    {"name": "airport", "type": ["null", "string"]}, {"name": "at", "type": ["null", "long"]},
    {"name": "parts", "type": {"type": "array", "items": "Tree"}},
    {"name": "named", "type": {"type": "map", "values": ["null", "Tree", "bytes"]}},
    {"name": "paid", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 2}]},
    {"name": "day", "type": ["null", {"type": "int", "logicalType": "date"}]},
    {"name": "time", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
]}
_SCHEMA = {"type": "object", "properties": {"airport": {"type": "string", "pattern": "^(a+)+$|^[A-Z]{3}$"},
    "at": {"type": "integer"}, "parts": {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}}}


class Keep(mp.Computation):
    def process_record(self, context, record):
        context.state.set({"last": record.value})
        context.produce("kept", record.value)


def _pipeline(name, key="airport", **options):
    made = mp.Pipeline(name)
    rows = made.inject("rows", key=key, at="at", watermark=mp.BoundedDisorder("10m"), **options)
    rows.apply(Keep(), name=f"keep_{name}", produces="kept").sink("kept", mp.DeltaSink(f"out/kept_{name}"))
    return made


def avro():
    return _pipeline("avro", payload=mp.AvroPayload(_TREE))


def avro_objects():
    return _pipeline("avro_objects", payload=mp.AvroPayload(_TREE, framing="single_object"))


def json_payload():
    return _pipeline("json_payload", payload=mp.JsonPayload(_SCHEMA))


def protobuf():
    from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2

    file = descriptor_pb2.FileDescriptorProto(name="tree.proto", package="t", syntax="proto3")
    file.dependency.extend(["google/protobuf/struct.proto", "google/protobuf/timestamp.proto"])
    tree = file.message_type.add(name="Tree")
    kinds = {"airport": (9, 1, ""), "at": (3, 1, ""), "parts": (11, 3, ".t.Tree"), "raw": (12, 1, ""),
             "any": (11, 1, ".google.protobuf.Struct"), "time": (11, 1, ".google.protobuf.Timestamp"),
             "numbers": (5, 3, "")}
    for number, (field, (kind, label, name)) in enumerate(kinds.items(), 1):
        tree.field.add(name=field, number=number, type=kind, label=label, type_name=name or None)
    given = descriptor_pb2.FileDescriptorSet(file=[file])
    return _pipeline("protobuf", payload=mp.ProtobufPayload(given.SerializeToString(), "t.Tree"))


def changes():
    return _pipeline("changes", change="op")


def typed():
    return _pipeline("typed", key=["airport", "id"], id="id")


def by_function():
    return _pipeline("by_function", key=lambda row: (row["airport"], row.get("id")))


def windows():
    made = mp.Pipeline("windows")
    rows = made.inject("rows", key="airport", at="at", at_unit="us", watermark=mp.BoundedDisorder("10m"))
    rows.window(mp.FixedWindows("1h")).combine(mp.Count(), name="hours")
    return made
"""
APP_MODULE: Final = "strangers"
AGAIN: Final = ("change the input",)
"""In place of a command: the input changes."""

_APPS: Final = (
    "avro",
    "avro_objects",
    "json_payload",
    "protobuf",
    "changes",
    "typed",
    "by_function",
    "windows",
)
_PAYLOADS: Final = frozenset({"avro", "avro_objects", "json_payload", "protobuf"})

_BEGIN_US: Final = 1_700_100_000_000_000
_NAMES: Final = (
    "airport", "at", "id", "id", "key", "state", "timers", "value", "op", "before", "after", "superstep", "",
    " ", "\0", "a\nb", "a.b", "a`b", 'a"b', "x;--", "$(id)", "__millpond_productions", "__MILLPOND_key",
    "__change_sign", "__row_at", "_commit_version", "x" * 10_000, "é" * 300, ESCAPES, "window", "pane",
)  # fmt: skip
_FOLDER_NAMES: Final = (
    "in",
    "in[1]",
    "*",
    "in?",
    "a{b,c}",
    "key=x",
    "%2e%2e",
    "-rf",
    "in\nx",
    "é\u202e",
    "x=y=z",
)
_SUFFIXES: Final = (
    ".json", ".jsonl", ".csv", ".parquet", ".json.gz", ".csv.gz", ".PARQUET", ".txt", "", ".avro", ".parquet.gz",
)  # fmt: skip


def replay_on(given: str) -> tuple[str, ...]:
    """Return the command that replays the honest store on another input."""
    words = ("replay", "pond", "out/replay", "--version", "1", "--app", "flights:pipeline")
    return (*words, "--input", f"flights={given}")


class Forger(Vandal):
    """Makes hostile inputs in ``folder``, with links to the folder ``canary``."""

    def __init__(self, rng: np.random.Generator, folder: Path, canary: Path) -> None:
        super().__init__(rng, folder, canary)
        self._top = folder
        self.table_rows = 0

    def forge(self) -> Commands:
        """Make an input, and return the commands that read it."""
        makers: list[Callable[[], Commands]] = [
            *(self._flights,) * 6, *(self._strange_app,) * 6, *(self._load,) * 4, self._settings,
        ]  # fmt: skip
        return self._one_of(makers)()

    def again(self) -> None:
        """Change the input, as between two runs."""
        self._damage_files(1)

    # -- commands ------------------------------------------------------------------------------

    def _flights(self) -> Commands:
        store = self._one_of(["pond", "fresh", "fresh"])
        suffix = (
            ".json"
            if store == "pond"
            else self._one_of([".json", ".json.gz", ".csv", ".csv.gz", ".parquet", ".parquet"])
        )
        given = self._rows_in(suffix, folder=True if store == "pond" else None)
        if store == "pond":
            # In front of the others, because the store has consumed them.
            for path in (self._top.parent / "flights").iterdir():
                (self._pond / f"!{path.name}").write_bytes(path.read_bytes())
        run = (
            "run",
            "flights:pipeline",
            "--store",
            store,
            "--input",
            f"flights={given}",
            "--more-to-come",
            "--quiet",
        )
        replay = replay_on(given)
        retry = ("dead-letters", "retry", store, "--all")
        reads = [*_reads(store, "window_counter"), ("diff", "pond_of_today", store)]
        return self._one_of([[run, *self._some(reads)], [run, retry, run], [replay], [run, AGAIN, run]])

    def _strange_app(self) -> Commands:
        name = self._one_of(list(_APPS))
        suffix = self._one_of([".parquet", ".json"] if name in _PAYLOADS else [".json", ".csv", ".parquet"])
        given = self._rows_in(suffix, name)
        run = ("run", f"{APP_MODULE}:{name}", "--store", "fresh", "--input", f"rows={given}", "--quiet")
        reads = _reads("fresh", f"keep_{name}")
        more = (*run, "--more-to-come")
        return self._one_of(
            [
                [run, *self._some(reads)],
                [more, ("dead-letters", "retry", "fresh", "--all"), run],
                [more, AGAIN, run],
            ]
        )

    def _load(self) -> Commands:
        suffix = self._one_of([".parquet", ".parquet", ".csv", ".json", ".jsonl", *_SUFFIXES])
        given = self._rows_in(suffix, "load", folder=False)
        load = (
            "load",
            "fresh",
            "counts",
            given,
            "--create",
            "--codec",
            self._one_of(["json", "json", "msgpack", "bytes"]),
        )
        return [load, *self._some(_reads("fresh", "counts"))]

    def _settings(self) -> Commands:
        path = self._top / "in.toml"
        self._top.mkdir(exist_ok=True)
        text = self._one_of(
            [
                b"x = " + b"[" * 100_000, b"x = 1" + b"0" * 5_000, b"\xff\xfe", b"a.b.c = 1", b"x = 1" * 1_000_000,
                b"x." * 50_000 + b"x = 1", b"'\x1b]0;x' = 'a'", b"aws_endpoint = 3", b"aws_region = 'x'\n" * 2, b"",
                b"x = nan", b"x = 9999-99-99", b"\xef\xbb\xbfx = 'a'", b"x = '" + b"y" * 5_000_000 + b"'", b"\0",
                b"user = 'a'\npassword = '\x1b'", b"tls = 'maybe'", b"grants = [" + b"'a'," * 99_999 + b"]",
            ]
        )  # fmt: skip
        write_file(path, text)
        self.deeds.append(f"settings {text[:60]!r}")
        option = self._one_of(["--storage-options-file", "--zookeeper-security"])
        if option == "--zookeeper-security":
            return [
                (
                    "savepoint",
                    "pond",
                    "x",
                    option,
                    str(path.relative_to(self._top.parent)),
                )
            ]
        return [("status", "pond", option, str(path.relative_to(self._top.parent)))]

    def _some(self, given: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        return [self._one_of(given) for _ in range(int(self._rng.integers(3)))]

    # -- files ---------------------------------------------------------------------------------

    def _rows_in(self, suffix: str, app: str = "flights", *, folder: bool | None = None) -> str:
        """Write some files of rows, damage them, and return the path to name on the command line."""
        name = self._one_of(list(_FOLDER_NAMES)) if self._rng.random() < 0.3 else "in"
        self._pond = self._top / name
        self._pond.mkdir(parents=True)
        for number in range(int(self._rng.integers(1, 4))):
            stem = self._one_of(
                [f"{number}", f"{number}", f"part[{number}]", "*", f"key={number}", "a\x1b[2Kb", "é\u202e"]
            )
            path = self._pond / f"{stem}{suffix}"
            with suppress(OSError, ValueError, pa.ArrowException, UnicodeError, OverflowError):
                self.deeds.append(f"{path.name!r}: {self._write_rows(path, app)}"[:300])
        self._damage_files(int(self._rng.integers(0, 3)))
        # Whoever names a link means what it leads to.
        found = [path for path in sorted(self._pond.rglob("*")) if not path.is_symlink()] or [self._pond]
        is_folder = self._rng.random() < 0.6 if folder is None else folder
        path = self._pond if is_folder else self._one_of(found)
        if self._rng.random() < 0.05:
            path = self._top / self._one_of(["nowhere", "link"])
            (self._top / "link").symlink_to(self._one_of([self._pond, "link", self._pond / "0.json"]))
        return str(path.relative_to(self._top.parent))

    def _damage_files(self, count: int) -> None:
        for _ in range(count):
            name = self._one_of(list(_DEEDS))
            with suppress(OSError, ValueError, IndexError, RecursionError, pa.ArrowException):
                self.deeds.append(f"{name}: {_DEEDS[name](self)}"[:300])

    def _write_rows(self, path: Path, app: str) -> str:
        kind = path.suffixes[0].lower() if path.suffixes else self._one_of([".json", ".csv", ".parquet"])
        if kind == ".csv":
            detail, data = self._csv(app)
        elif kind == ".parquet":
            detail, data = self._parquet(app)
        else:
            detail, data = self._json_lines(app)
        if path.suffix == ".gz":
            data = gzip.compress(data)
        path.write_bytes(data)
        return detail

    def _row(self, app: str, number: int) -> dict[str, Any]:
        airport = ["EWR", "JFK", "LGA", "ORD"][number % 4]
        row: dict[str, Any] = {"airport": airport, "at": _BEGIN_US + number * 60_000_000, "id": number}
        if app in _PAYLOADS:
            return {"value": self._payload(app, row)}
        if app == "load":
            state = {"count": number}
            return {
                "key": f"{airport}{number}",
                "state": state,
                "timers": [{"at": row["at"], "tag": str(number)}],
            }
        if app == "changes":
            ops = ["c"] * 12 if number % 3 else ["u", "d", "r", "x", 5, None]
            before = self._one_of([None, row, {}]) if number % 3 == 0 else None
            return {"op": self._one_of(ops), "before": before, "after": row}
        return row

    def _payload(self, app: str, row: dict[str, Any]) -> Any:
        honest = self._honest_payload(app, row)
        if self._rng.random() < 0.9:
            return honest
        data = bytearray(honest)
        for _ in range(int(self._rng.integers(1, 4))):
            data[int(self._rng.integers(len(data)))] = int(self._rng.integers(256))
        deep = int(self._rng.integers(1, 300_000))
        return self._one_of(
            [
                bytes(data), honest[: len(honest) // 2], b"", None, b"\xff" * 20, honest + honest,
                b"\0\0\x02" * deep, b"\0\0\x02" + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x02\x02\0\0" * deep,
                _nested(deep % 5_000), b"[" * deep, b'{"parts":' * deep, b'{"airport":"' + b"a" * 40 + b'!"}',
                b"\xc3\x01" + bytes(8) + honest, 7, ESCAPES, b"\0" * 5_000_000,
            ]
        )  # fmt: skip

    def _honest_payload(self, app: str, row: dict[str, Any]) -> bytes:
        airport, at = str(row["airport"]).encode(), int(row["at"])
        if app == "protobuf":
            return b"\x0a" + bytes([len(airport)]) + airport + b"\x10" + _varint(at)
        if app == "json_payload":
            return json.dumps({"airport": row["airport"], "at": at}).encode()
        return b"\x02" + bytes([2 * len(airport)]) + airport + b"\x02" + _varint(2 * at) + b"\0\0\0\0\0"

    def _rows(self, app: str) -> list[Any]:
        rows: list[Any] = [self._row(app, number) for number in range(int(self._rng.integers(1, 60)))]
        for _ in range(int(self._rng.integers(0, 4))):
            place = int(self._rng.integers(len(rows)))
            rows[place] = self._mutated(rows[place])
        return rows

    def _json_lines(self, app: str) -> tuple[str, bytes]:
        rows = [
            {name: part.decode("latin-1") if isinstance(part, bytes) else part for name, part in row.items()}
            if isinstance(row, dict) else row
            for row in self._rows(app)
        ]  # fmt: skip
        if self._rng.random() < 0.2:
            name = self._one_of(list(_NAMES))
            rows = [{**row, name: self._value()} if isinstance(row, dict) else row for row in rows]
        lines = [text_bytes(dump_json(row, default=str)) for row in rows]
        if self._rng.random() < 0.5:
            begin, repeated, count, end = self._one_of(list(_ODD_LINES))
            line = begin + repeated * count + end
            lines.insert(int(self._rng.integers(len(lines) + 1)), line)
            return f"json {line[:40]!r} of {len(line)}", b"\n".join(lines)
        return f"json {len(lines)}", self._one_of([*[b"\n"] * 12, b"\r\n", b"\n\n", b"\r"]).join(lines)

    def _csv(self, app: str) -> tuple[str, bytes]:
        rows = [row if isinstance(row, dict) else {"x": row} for row in self._rows(app)]
        names = list(dict.fromkeys(name for row in rows for name in row))
        if self._rng.random() < 0.3:
            names.insert(int(self._rng.integers(len(names) + 1)), self._one_of(list(_NAMES)))
        cells = [[_csv_cell(row.get(name)) for name in names] for row in rows]
        if self._rng.random() < 0.4:
            cells[int(self._rng.integers(len(cells)))][int(self._rng.integers(len(names)))] = self._one_of(
                ["9" * 20, "-" + "9" * 30, "1e999", "nan", "0x10", "١٢", '"', '"open', "a\0b", ESCAPES, "\r", "=1+1",
                 "x" * 900_000, "y" * 3_000_000, '"' + "z\n" * 200_000 + '"', "true", "1_000", " 7", "\ufeff"]
            )  # fmt: skip
        lines = [
            text_bytes(self._one_of([*[","] * 20, ";", "\t", "|"]).join(_csv_cell(name) for name in names))
        ]
        lines += [text_bytes(",".join(row)) for row in cells]
        odd = self._one_of(
            ["", "", "", "", "bom", "utf16", "nul", "ragged", "wide", "no header", "latin", "quotes", "cr", "blank", "twice"]
        )  # fmt: skip
        if odd == "wide":
            lines = [b",".join(b"c%d" % number for number in range(int(self._rng.integers(2, 100_000))))]
        changes: dict[str, Callable[[bytes], bytes]] = {
            "bom": lambda data: b"\xef\xbb\xbf" + data,
            "utf16": lambda data: data.decode("utf-8", "replace").encode("utf-16"),
            "nul": lambda data: data.replace(b",", b"\0,"),
            "ragged": lambda data: data + b"\n,,,,,,,,,,,,\na",
            "no header": lambda data: data.partition(b"\n")[2],
            "latin": lambda data: data.replace(b"EWR", b"\xe9\xff"),
            "quotes": lambda data: data.replace(b"E", b'"'),
            "cr": lambda data: data.replace(b"\n", b"\r"),
            "blank": lambda data: b"\n\n\n" + data,
            "twice": lambda data: lines[0] + b"," + data,
        }
        return f"csv {odd} {names!r}", changes.get(odd, lambda data: data)(b"\n".join(lines) + b"\n")

    # -- parquet -------------------------------------------------------------------------------

    def _parquet(self, app: str) -> tuple[str, bytes]:
        if self._rng.random() < 0.05:
            depth, wide = self._one_of([(5, 1), (99, 1), (200, 1), (50_000, 1), (1, 20_000)])
            return f"schema {depth} deep, {wide} wide", _deep_parquet(depth, wide)
        what = self._one_of(
            ["honest", "cell", "cell", "cell", "cell", "cell", "twice", "bomb", "page", "rows", "none"]
        )
        if app == "changes" and what in {"bomb", "page"}:
            # All changes of a run are in memory, as the documentation says.
            what = "honest"
        table, detail = self._changed(app, what, self._table(app))
        self.table_rows += table.num_rows
        options: dict[str, Any] = {
            "compression": self._one_of(["none", "snappy", "zstd", "gzip", "lz4", "brotli"]),
            "version": self._one_of(["1.0", "2.4", "2.6"]),
            "data_page_version": self._one_of(["1.0", "2.0"]),
            "use_dictionary": what == "bomb" or (what != "page" and bool(self._rng.random() < 0.5)),
            "row_group_size": self._one_of([1, 7, 1_000_000]) if table.nbytes < 1_000_000 else 1_000_000,
        }
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, **options, data_page_size=1 << 30 if what == "page" else None)
        data = sink.getvalue().to_pybytes()
        if self._rng.random() < 0.25 and what != "page":
            data, lie = self._lie(data)
            detail += f" {lie}"
        return f"parquet {detail} {options}", data

    def _changed(self, app: str, what: str, table: pa.Table) -> tuple[pa.Table, str]:
        rows, place = table.num_rows, int(self._rng.integers(table.num_columns))
        name = table.column_names[place]
        if what == "cell":
            array = self._odd_array(rows)
            if self._rng.random() < 0.5:
                return table.set_column(place, name, array), f"{name} is {array.type}"
            name = self._one_of([*_NAMES, "x", "x"])
            return table.append_column(name, array), f"with {name} {array.type}"
        if what == "twice":
            return table.append_column(name, table.column(name)), f"twice {name}"
        if what == "bomb":
            size, many = self._one_of(
                [(1_000_000, 1_000), (20_000_000, 60), (150_000, 5_000), (1_000, 100_000), (60_000_000, 10)]
            )
            words = pa.DictionaryArray.from_arrays(pa.array(np.zeros(many, np.int32)), pa.array(["x" * size]))
            table = table.take(pa.array(np.arange(many) % rows))
            table = table.select(["key"]) if app == "load" else table
            return table.append_column("state" if app == "load" else "x", words), f"bomb {size} {many}"
        if what == "page":
            many = int(self._rng.integers(2, 1_000_000))
            kind = self._one_of([pa.int64(), pa.binary(1_000), pa.binary(100_000)])
            many = many if kind == pa.int64() else 20_000_000 // kind.byte_width
            zeros = pa.Array.from_buffers(kind, many, [None, pa.py_buffer(bytes(many * kind.byte_width))])
            return table.take(pa.array(np.arange(many) % rows)).append_column(
                "x", zeros
            ), f"page of {many} {kind}"
        return {"rows": table.slice(0, 0), "none": pa.table({})}.get(what, table), what

    def _table(self, app: str) -> pa.Table:
        rows = [row if isinstance(row, dict) else {} for row in self._rows(app)]
        rows[0] = self._row(app, 0)
        columns: dict[str, Any] = {}
        for name in rows[0]:
            cells = [row.get(name) for row in rows]
            try:
                columns[name] = pa.array(cells)
            except (pa.ArrowException, OverflowError, TypeError, UnicodeError, ValueError):
                columns[name] = pa.array([str(cell).encode("utf-8", "replace") for cell in cells])
        return pa.table(columns)

    def _odd_array(self, rows: int) -> pa.Array:
        big = [-(2**63), 2**63 - 1, 0, -1, None]
        numbers = [self._one_of(big) for _ in range(rows)]
        texts = ["a", "", ESCAPES, None, "\0", "x" * 1_000, "é", "1", "2024-01-01T00:00:00Z"]
        text = [self._one_of(texts) for _ in range(rows)]
        unit, zone = (
            self._one_of(["s", "ms", "us", "ns"]),
            self._one_of([None, "UTC", "Europe/Berlin", "+99:99", "x/../y"]),
        )
        deep = self._one_of([1, 5, 45, 90])
        makers: list[Callable[[], pa.Array]] = [
            lambda: pa.array(numbers, pa.int64()),
            lambda: pa.array([abs(one or 0) * 2 for one in numbers], pa.uint64()),
            lambda: pa.array(numbers, pa.duration(unit)),
            lambda: pa.array(numbers, pa.timestamp(unit, zone)),
            lambda: pa.array(numbers, pa.date64()),
            lambda: pa.array(numbers, pa.time64(self._one_of(["us", "ns"]))),
            lambda: pa.array(rows * [self._one_of([-(2**31), 2**31 - 1, 0])], pa.date32()),
            lambda: pa.array(rows * [2**31 - 1], pa.time32("ms")),
            lambda: pa.array(rows * [10**37], pa.decimal128(38, 0)),
            lambda: pa.array(rows * [10**70], pa.decimal256(76, -1 if unit == "s" else 3)),
            lambda: pa.array(rows * [self._one_of([np.nan, np.inf, -0.0, 1e308])], pa.float64()),
            lambda: pa.array(np.full(rows, np.nan, np.float16)),
            lambda: pa.array(
                text, self._one_of([pa.string_view(), pa.large_string(), pa.binary(), pa.binary_view()])
            ),
            lambda: pa.array(text).dictionary_encode(),
            lambda: pa.array(
                [[one] for one in text], self._one_of([pa.list_(pa.string()), pa.large_list(pa.string())])
            ),
            lambda: pa.array(
                rows * [[1, None]], self._one_of([pa.list_(pa.int8(), 2), pa.list_view(pa.int8())])
            ),
            lambda: pa.array(rows * [[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
            lambda: pa.array(rows * [[(1.5, b"x")]], pa.map_(pa.float64(), pa.binary())),
            lambda: pa.array(rows * [{"a": {"b": ["c"]}, "key": None}]),
            lambda: pa.array(rows * [{"": 1, "a\nb": 2, ESCAPES: 3}]),
            lambda: pa.array(rows * [b"0123456789abcdef"], pa.binary(16)),
            lambda: pa.ExtensionArray.from_storage(
                pa.uuid(), pa.array(rows * [b"0123456789abcdef"], pa.binary(16))
            ),
            lambda: pa.ExtensionArray.from_storage(
                pa.json_(pa.string()), pa.array(rows * ["["], pa.string())
            ),
            lambda: pa.ExtensionArray.from_storage(pa.bool8(), pa.array(rows * [7], pa.int8())),
            lambda: pa.ExtensionArray.from_storage(
                pa.opaque(pa.binary(), ESCAPES, "x"), pa.array(rows * [b"\x80\x04."], pa.binary())
            ),
            lambda: pa.nulls(rows),
            lambda: pa.array(rows * [True]),
            lambda: _bad_text(rows),
            lambda: _deep_array(rows, deep),
        ]
        return self._one_of(makers)()

    def _lie(self, data: bytes) -> tuple[bytes, str]:
        """Change a number in the footer or in the header of the first page."""
        where = self._one_of(["footer", "footer", "page", "page"])
        size = struct.unpack("<I", data[-8:-4])[0]
        if where == "page":
            number = self._one_of([2**31 - 1, 2**30, 0, 1, 2**40])
            # After the type come the sizes, uncompressed and compressed.
            place = _after_varint(data, 5) + 1
            if self._rng.random() < 0.3:
                place = _after_varint(data, place) + 1
            return (
                data[:place] + _varint(2 * number) + data[_after_varint(data, place) :],
                f"page header says {number}",
            )
        changed = bytearray(data)
        for _ in range(int(self._rng.integers(1, 6))):
            place = len(data) - 8 - size + int(self._rng.integers(size))
            changed[place] = self._one_of([0, 1, 2, 0x7F, 0x80, 0xFF, int(self._rng.integers(256))])
        return bytes(changed), "footer changed"

    # -- deeds ---------------------------------------------------------------------------------

    def _rename(self) -> str:
        path = self._file()
        target = path.with_name(f"{path.name.partition('.')[0]}{self._one_of(list(_SUFFIXES))}")
        path.rename(target)
        return f"{path.name!r} {target.name!r}"

    def _twice(self) -> str:
        path = self._file()
        copy = path.with_name(f"z{path.name}")
        kind = self._one_of(["copy", "hard", "link"])
        if kind == "copy":
            copy.write_bytes(path.read_bytes())
        elif kind == "hard":
            copy.hardlink_to(path)
        else:
            copy.symlink_to(path.name)
        return f"{kind} {path.name!r}"

    def _zip_bomb(self) -> str:
        # All changes of a run are in memory, as the documentation says. 60 MB may be ten million lines, each of which is
        # refused for a reason of its own, and that takes more than a minute.
        size = self._one_of([1, 20])
        part = self._one_of(
            [
                b"x" * 999 + b"\n",
                b"\0" * 1_000,
                b"\n" * 1_000,
                b"a,b,c\n" * 170,
                b'{"at":1}\n' * 111,
                b"x" * 1_000,
            ]
        )
        path = self._pond / self._one_of(["9.json.gz", "9.csv.gz"])
        write_file(path, gzip.compress(part * 1_000 * size, 6))
        return f"{size} MB of {part[:9]!r} {path.name}"

    def _link_out(self) -> str:
        path = self._pond / self._one_of(["5.json", "5.csv", "5.parquet", "below", "0.json", ".hidden.json"])
        clear(path)
        target = self._one_of(
            [self._canary / "precious.txt", self._canary, self._canary / "rows.json", "/dev/zero", "/proc/self/environ",
             "/dev/stdin", path.name, ".", "..", "nowhere", self._canary / "folder"]
        )  # fmt: skip
        path.symlink_to(target)
        return f"{path.name} -> {target}"

    def _folders(self) -> str:
        depth = self._one_of([1, 3, 40])
        folder = self._pond.joinpath(
            *[self._one_of(["a", "key=x", "[a]", "_delta_log", ".git", "*"]) for _ in range(depth)]
        )
        folder.mkdir(parents=True, exist_ok=True)
        path = self._file()
        (folder / path.name).write_bytes(path.read_bytes())
        return str(folder.relative_to(self._pond))[:80]

    def _empty(self) -> str:
        path = self._file()
        path.write_bytes(b"")
        return path.name


def _reads(store: str, computation: str) -> Commands:
    return [
        ("rows", store, computation),
        ("rows", store, computation, "--json"),
        ("rows", store, "dead_letters"),
        ("sql", store, f"from {computation}"),
        ("sql", store, "from dead_letters", "--format", "csv"),
        ("dead-letters", "list", store),
        ("dead-letters", "list", store, "--json"),
        ("dead-letters", "show", store, "windows/0000000001/000000"),
        ("status", store),
        ("status", store, "--check"),
        ("history", store),
        ("export", store, "out/tables"),
        ("verify", store),
        ("complete", "rows", store),
    ]


def _csv_cell(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)
    quoted = text.replace('"', '""')
    return f'"{quoted}"' if any(sign in text for sign in ',"\n') else text


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(data) + bytes([number])


def _after_varint(data: bytes, place: int) -> int:
    while data[place] & 0x80:
        place += 1
    return place + 1


def _nested(depth: int) -> bytes:
    """Return a Protobuf message within itself ``depth`` times."""
    data = b""
    for _ in range(depth):
        data = b"\x1a" + _varint(len(data)) + data
    return data


def _bad_text(rows: int) -> pa.Array:
    data = b"\xff\xfe\x80" * rows
    offsets = np.arange(rows + 1, dtype=np.int32) * 3
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def _deep_array(rows: int, depth: int) -> pa.Array:
    array: pa.Array = pa.array(rows * [1], pa.int8())
    for _ in range(depth):
        array = pa.StructArray.from_arrays([array], ["a"])
    return array


def _deep_parquet(depth: int, wide: int) -> bytes:
    """Return a Parquet file without rows whose schema is nested, written by hand because no writer makes it."""
    leaf = b"\x15\x02\x25\x00\x18\x01a\x00"
    group = b"\x35\x00\x18\x01a\x15" + _varint(2 * wide) + b"\x00"
    elements = [b"\x35\x00\x18\x01a\x15\x02\x00"] * depth + [group] + [leaf] * wide
    footer = b"\x15\x02\x19\xfc" + _varint(len(elements)) + b"".join(elements) + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _some(deed: Callable[[Forger, Path], str]) -> Callable[[Forger], str]:
    return lambda forger: deed(forger, forger._file())


_F: Final = Forger
_DEEDS: Final[dict[str, Callable[[Forger], str]]] = {
    **{f"flip {number}": _some(_F._flip) for number in range(2)},
    "cut": _some(_F._cut),
    "stretch": _some(_F._stretch),
    "splice": _some(_F._splice),
    "swap": _F._swap,
    "remove": _F._remove,
    "rename": _F._rename,
    "twice": _F._twice,
    "zip bomb": _F._zip_bomb,
    **{f"link out {number}": _F._link_out for number in range(2)},
    "odd file": _F._odd_file,
    "stranger": _F._stranger,
    "folders": _F._folders,
    "empty": _F._empty,
}
