"""The repository's own rules, beyond the checks of ruff and mypy.

Each rule is a function from one `Source`, or from all of them, to its `Finding`s; `RULES` and `WHOLE_RULES`
name them all. `tests/test_tidy.py` runs them over the repository, and over planted violations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

LINKED: Final = ("statestore", "gc", "executor", "migrations")
"""The folders at the root that `millpond/` links to."""

ROOMS: Final = (*LINKED, "cli", "testing")
"""The parts of the package; the last two lie in `millpond/` itself."""

ROOMS_BELOW: Final = {
    "statestore": ("migrations",),  # Opening a catalog migrates its schema.
    "migrations": ("statestore",),
    "gc": ("statestore",),
    "executor": ("gc", "statestore"),
    "cli": ("the public face", "executor", "gc", "statestore", "testing", "migrations"),
    "testing": ("the public face", "executor", "gc", "statestore"),
}
"""Which rooms a room may import from, besides itself: arrows point down."""

TOP: Final = "top"
"""The files of a room that lie above its sub-rooms; those of `STATESTORE_TOP` in `statestore/`."""

ROOT_FILES: Final = "root"
"""The files of a room that lie below its sub-rooms."""

SUB_ROOMS_BELOW: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "statestore": {
        ROOT_FILES: (),
        "objects": (ROOT_FILES,),
        "rows": ("objects",),
        "log": ("rows",),
        "leases": ("log",),
        "history": ("leases",),
        "catalog": ("history",),
        "loading": ("history",),
        TOP: ("catalog", "loading"),
    },
    "executor": {
        "time": (),
        "computation": ("time",),
        "sinks": ("time",),
        "inputs": ("computation",),
        "pipeline": ("inputs", "sinks"),
        "interval": ("pipeline",),
        "ownership": ("interval",),
        "watermark": ("interval",),
        "maintenance": ("ownership",),
        "superstep": ("maintenance", "watermark"),
        "run": ("superstep",),
        "local": ("run",),
        "spark": ("run",),
        "windows": ("spark",),
        "replay": ("local", "spark"),
        "spark_compat": ("replay",),
    },
    "testing": {
        "servers": (),
        "faults": ("servers",),
        "fixtures": ("faults",),
        "processes": ("fixtures",),
        "transcripts": ("fixtures",),
        "simulation": ("fixtures",),
        TOP: ("processes", "transcripts", "simulation"),
    },
}
"""
Which sub-rooms each sub-room of a room rests on. It may import from those, from what they rest on, and from
itself; imports for type checking count. A new sub-room is refused until it has its place here.
"""

STATESTORE_TOP: Final = ("store", "view", "view_columns")
"""The modules of `statestore/` that lie above its sub-rooms; the other ones lie below."""

BANNED: Final = {
    "time": "take a Clock",
    "random": "take an Rng",
    # Not the module: a UUID is also a type of values.
    **{f"uuid.uuid{number}": "take an Rng and use token()" for number in (1, 4, 6, 7, 8)},
    "secrets": "take an Rng and use token()",
    "threading.Timer": "wait on a Condition or an Event with a timeout",
    "datetime.datetime.now": "take a Clock and use now_us()",
    "datetime.datetime.utcnow": "take a Clock and use now_us()",
    "datetime.datetime.today": "take a Clock and use now_us()",
    "datetime.date.today": "take a Clock and use now_us()",
}
"""What only `statestore/system.py` may touch, and what everybody else uses."""

BANNED_IN_PACKAGE: Final = {**BANNED, "numpy.random": "take an Rng"}
"""The same for package code; tests and benchmarks may draw their data from a seed."""

DOCUMENT_LINE_MAX: Final = 120

_SYSTEM: Final = "statestore/system.py"
MAY_SKIP: Final = {
    "tests/conformance/test_leases.py": "a Docker engine",
    "tests/fault/test_full_disk.py": "the right to mount a file system",
    "tests/fault/test_power_cuts.py": "the right to mount a file system",
    "tests/format/test_back_and_forth.py": "the history of the repository",
}
"""The files with tests that a machine may be unable to run, and what it lacks then."""

_LEFTOVER: Final = re.compile(r"\b(?:FIX" + "ME|TO" + "DO|XX" + r"X|HA" + r"CK)\b")
_TEXT_SUFFIXES: Final = (".py", ".md", ".toml", ".yaml", ".yml", ".mako", ".sql", ".sh")
_CODE_FOLDERS: Final = (*LINKED, "millpond", "tests", "benchmarks", "examples", "docs", ".ci")

_NOT_READ: Final = (*(f"millpond/{room}/" for room in LINKED), "tests/format/v")
"""Links to the rooms, and stores that released versions have written."""

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation, printed as ``path:line: message``."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class Source:
    """A file of the repository: its path from the root, its text, and its syntax tree if it is Python."""

    path: str
    text: str

    @property
    def room(self) -> str:
        """Return the first part of the path."""
        return self._path_in_package.partition("/")[0]

    @property
    def module(self) -> str:
        """Return the module's name below ``millpond``; of an ``__init__``, the package's name."""
        return self._path_in_package.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def _path_in_package(self) -> str:
        inner = self.path.removeprefix("millpond/")
        return inner if inner.startswith(("cli/", "testing/")) else self.path

    @property
    def is_package_code(self) -> bool:
        """Return True if the file is part of the installed package."""
        return self.path.endswith(".py") and self.room in (*ROOMS, "millpond")

    def tree(self) -> ast.Module:
        """Return the syntax tree; of other files, an empty module's."""
        return _parsed(self)[0]

    def nodes(self) -> tuple[ast.AST, ...]:
        """Return all nodes of the tree."""
        return _parsed(self)[1]

    def finding(self, node: ast.AST, message: str) -> Finding:
        """Return a violation at a node of the tree."""
        return Finding(self.path, getattr(node, "lineno", 1), message)


@lru_cache(maxsize=1)
def _parsed(source: Source) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    # One file is enough for all rules that look at it in turn.
    tree = ast.parse(source.text if source.path.endswith(".py") else "", source.path)
    return tree, tuple(ast.walk(tree))


def repository_sources(root: Path = ROOT) -> Iterator[Source]:
    """Return every text file of the project: code, tests, documents, and the files at the root."""
    at_root = [path for path in sorted(root.iterdir()) if path.is_file()]
    in_folders = [path for folder in _CODE_FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in (*at_root, *in_folders):
        is_text = path.suffix in _TEXT_SUFFIXES or path.name == "Makefile" or path.parent.name == ".ci"
        if is_text and path.is_file():
            relative = path.relative_to(root).as_posix()
            if not relative.startswith(_NOT_READ):
                yield Source(relative, path.read_bytes().decode())


# ------------------------------------------------------------------------------ imports of a file


@lru_cache(maxsize=1)
def _imported_names(source: Source) -> dict[str, str]:
    """Return the full names behind the local names that the module's imports make."""
    names: dict[str, str] = {}
    for node in source.nodes():
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """Return the full name behind an expression, by the module's imports; empty if it is no name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


@lru_cache(maxsize=1_000)
def _imports(source: Source) -> tuple[tuple[ast.stmt, str], ...]:
    """Yield each import with the dotted name of its target; ``import x`` yields ``x.``."""
    found: list[tuple[ast.stmt, str]] = []
    for node in source.nodes():
        if isinstance(node, ast.Import):
            found += ((node, f"{alias.name}.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += ((node, f"{module}.{alias.name}") for alias in node.names)
    return tuple(found)


def banned_modules(source: Source) -> Iterator[Finding]:
    """No clock and no randomness but the injected ones."""
    if source.path == _SYSTEM:
        return
    bans = BANNED_IN_PACKAGE if source.is_package_code else BANNED
    for statement, name in _imports(source):
        for banned, instead in bans.items():
            if f"{name}.".startswith(f"{banned}."):
                yield source.finding(statement, f"`{banned}` is banned: {instead}")
    names = _imported_names(source)
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and _dotted(node, names) in bans:
            banned = _dotted(node, names)
            yield source.finding(node, f"`{banned}` is banned: {bans[banned]}")


def arrows_point_down(source: Source) -> Iterator[Finding]:
    """A room imports only from itself and from the rooms below it, by their full names."""
    if source.room not in ROOMS_BELOW:
        return
    allowed = {source.room, *ROOMS_BELOW[source.room]}
    for statement, name in _imports(source):
        parts = name.split(".")
        if parts[0] in ROOMS and parts[0] != "gc":
            yield source.finding(statement, f"import it as `millpond.{name}`")
        elif parts[0] == "":
            yield source.finding(statement, "no relative imports: they hide which room is meant")
        elif parts[0] == "millpond":
            room = parts[1] if parts[1] in ROOMS else "the public face"
            if room not in allowed:
                yield source.finding(statement, f"`{source.room}` may not import from {room}")


def sub_room_of(module: str) -> tuple[str, str]:
    """Return the room and the sub-room of a module of the package, given by its name below ``millpond``.

    Example:
        >>> sub_room_of("statestore.log.snapshot"), sub_room_of("statestore.errors")
        (('statestore', 'log'), ('statestore', 'root'))
    """
    room, *rest = module.split(".")
    if len(rest) > 1 or (len(rest) == 1 and rest[0] in SUB_ROOMS_BELOW.get(room, ())):
        return room, rest[0]
    is_root = room == "statestore" and rest != [] and rest[0] not in STATESTORE_TOP
    return room, ROOT_FILES if is_root else TOP


@lru_cache(maxsize=256)
def _rests_on(room: str, sub_room: str) -> frozenset[str]:
    """Return the sub-rooms that a sub-room may import from: itself, and all below."""
    below = SUB_ROOMS_BELOW[room].get(sub_room, ())
    return frozenset({sub_room}).union(*(_rests_on(room, each) for each in below))


def sub_room_arrows_point_down(source: Source) -> Iterator[Finding]:
    """A sub-room imports only from itself and from the sub-rooms below it in `SUB_ROOMS_BELOW`."""
    if source.room not in SUB_ROOMS_BELOW or not source.path.endswith(".py"):
        return
    room, own = sub_room_of(source.module)
    if own not in SUB_ROOMS_BELOW[room] and not source.path.endswith("/__init__.py"):
        yield Finding(source.path, 1, f"`{room}/{own}` has no place in SUB_ROOMS_BELOW")
        return
    for statement, name in _imports(source):
        if name.startswith(f"millpond.{room}."):
            other = sub_room_of(name.removeprefix("millpond.").rpartition(".")[0] or room)[1]
            if other not in _rests_on(room, own):
                yield source.finding(statement, f"`{room}/{own}` may not import from `{room}/{other}`")


def circles(sources: Iterable[Source]) -> Iterator[Finding]:
    """No module of the package imports, through others, itself; imports for type checking count."""
    modules = {f"millpond.{source.module}": source for source in sources if source.is_package_code}
    below = {name: _imported_modules(source, modules) - {name} for name, source in modules.items()}
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        circle = [str(module) for module in error.args[1]]
        yield Finding(modules[circle[0]].path, 1, f"a circle of imports: {' < '.join(circle)}")


def _imported_modules(source: Source, modules: Collection[str]) -> set[str]:
    names = [name.removesuffix(".") for _, name in _imports(source)]
    return {name if name in modules else name.rpartition(".")[0] for name in names} & set(modules)


# ------------------------------------------------------------------------------ behaviour


def swallowed_errors(source: Source) -> Iterator[Finding]:
    """A handler of every error must do something about it."""
    names = _imported_names(source)
    for node in source.nodes():
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type) and _does_nothing(node.body):
            yield source.finding(node, "every error is swallowed: name the errors, or handle them")
        elif isinstance(node, ast.Call) and _dotted(node.func, names) == "contextlib.suppress":
            for argument in filter(_catches_all, node.args):
                yield source.finding(argument, "every error is swallowed: name the errors, or handle them")


def _catches_all(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_catches_all(element) for element in kind.elts)
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(statement, (ast.Pass, ast.Continue))
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def unbounded_memory(source: Source) -> Iterator[Finding]:
    """Every cache and every queue of package code states its bound."""
    if not source.is_package_code:
        return
    names = _imported_names(source)
    for node in source.nodes():
        if isinstance(node, _FUNCTIONS):
            cached = any(_dotted(decorator, names) == "functools.cache" for decorator in node.decorator_list)
            arguments = node.args
            if cached and (arguments.args or arguments.posonlyargs or arguments.kwonlyargs):
                yield source.finding(node, "functools.cache has no bound: lru_cache(maxsize=…)")
        elif isinstance(node, ast.Call):
            called = _dotted(node.func, names)
            if called in ("queue.Queue", "queue.LifoQueue") and not (node.args or node.keywords):
                yield source.finding(node, "a queue without maxsize has no bound")
            if called == "queue.SimpleQueue":
                yield source.finding(node, "a SimpleQueue has no bound: Queue(maxsize=…)")


# ------------------------------------------------------------------------------ text


def long_document_lines(source: Source) -> Iterator[Finding]:
    """Documents are read in editors and diffs, too: only table rows and lone addresses are wider."""
    if source.path.endswith(".md"):
        for number, line in enumerate(source.text.splitlines(), start=1):
            is_address = "://" in line and " " not in line.strip()
            if len(line) > DOCUMENT_LINE_MAX and not line.lstrip().startswith("|") and not is_address:
                yield Finding(source.path, number, f"{len(line)} characters, {DOCUMENT_LINE_MAX} at most")


def leftovers(source: Source) -> Iterator[Finding]:
    """Unfinished work belongs in an issue, not in a file."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := _LEFTOVER.search(line):
            yield Finding(source.path, number, f"leftover {found.group()}")


def ragged_lines(source: Source) -> Iterator[Finding]:
    """No line ends in spaces, and a file ends with one line feed, so that a diff shows only real changes."""
    for number, line in enumerate(source.text.split("\n"), start=1):
        if line != line.rstrip():
            yield Finding(source.path, number, "spaces at the end of the line")
    if source.text and (not source.text.endswith("\n") or source.text.endswith("\n\n")):
        yield Finding(source.path, source.text.count("\n"), "the file does not end with one line feed")


def skips(source: Source) -> Iterator[Finding]:
    """A test is skipped only for the names in `MAY_SKIP`, because it must bring all other needs along."""
    if source.path in MAY_SKIP:
        return
    names = _imported_names(source)
    skipping = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and _dotted(node, names) in skipping:
            yield source.finding(node, "bring along what the test needs, or name it in MAY_SKIP")


_RUNS_ITS_BYTES: Final = (
    *(f"{module}.{name}" for module in ("pickle", "cloudpickle", "marshal") for name in ("load", "loads")),
    *("pickle.Unpickler", "shelve.open", "numpy.load", "pandas.read_pickle", "eval", "exec"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "importlib.import_module", "importlib.__import__"),
)


def bytes_that_run(source: Source) -> Iterator[Finding]:
    """Code that turns bytes or names into code must state on its line why the bytes are trusted."""
    if not source.is_package_code:
        return
    names, lines = _imported_names(source), source.text.splitlines()
    for node in source.nodes():
        is_call = isinstance(node, ast.Call) and _dotted(node.func, names) in _RUNS_ITS_BYTES
        if is_call and "#" not in lines[node.lineno - 1]:
            yield source.finding(node, "this runs what it reads: say on the line why the bytes are ours")


RULES: Final[tuple[Callable[[Source], Iterator[Finding]], ...]] = (
    banned_modules,
    arrows_point_down,
    sub_room_arrows_point_down,
    swallowed_errors,
    unbounded_memory,
    long_document_lines,
    leftovers,
    ragged_lines,
    skips,
    bytes_that_run,
)
"""All rules about one file, run over every source."""

WHOLE_RULES: Final[tuple[Callable[[Iterable[Source]], Iterator[Finding]], ...]] = (circles,)
"""All rules about the repository as a whole."""
