"""What the repository holds itself to beyond what ruff and mypy can say.

Each rule is a function from one `Source`, or from all of them, to its `Finding`s; `RULES` and `WHOLE_RULES`
name them all.
`tests/test_tidy.py` runs them over the repository, and over planted violations.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent

ROOMS: Final = ("statestore", "gc", "executor", "dataflow", "tools", "testing", "migrations")
"""The folders that `millpond/` links to."""

ROOMS_BELOW: Final = {
    "statestore": ("migrations",),  # opening a catalog brings its schema up to date
    "migrations": ("statestore",),
    "gc": ("statestore",),
    "executor": ("gc", "statestore"),
    "dataflow": ("executor", "gc", "statestore"),
    "tools": ("the public face", "dataflow", "executor", "gc", "statestore", "testing", "migrations"),
    "testing": ("the public face", "dataflow", "executor", "gc", "statestore"),
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
        "keys": (ROOT_FILES,),
        "rows": ("keys", "objects"),
        "log": ("rows",),
        "views": ("rows",),
        "commit": ("log",),
        "catalog": ("log",),
        "leases": ("log",),
        "identity": ("commit", "leases"),
        "versions": ("identity",),
        "loading": ("identity",),
        "integrity": ("log",),
        "zookeeper": ("leases", "log"),
        TOP: ("catalog", "identity", "integrity", "loading", "versions", "views", "zookeeper"),
    },
    "executor": {
        "event_time": (),
        "computation": ("event_time",),
        "injectors": ("event_time",),
        "payloads": (),
        "sinks": ("event_time",),
        "soft_state": ("computation",),
        "pipeline": ("computation", "injectors", "payloads", "sinks"),
        "bundle": ("pipeline", "soft_state"),
        "ownership": ("bundle",),
        "watermark": ("bundle",),
        "maintenance": ("ownership",),
        "balance": ("ownership",),
        "dead_letters": ("bundle",),
        "superstep": ("balance", "dead_letters", "maintenance", "watermark"),
        "reporting": ("superstep",),
        "run": ("reporting",),
        "local": ("run",),
        "python_workers": ("superstep",),
        "spark": ("python_workers", "run"),
        "repair": ("ownership",),
        "replay": ("local", "repair", "spark"),
        "spark_api": ("spark",),
        "checkpoint_import": ("repair", "spark_api"),
        "embedding": ("spark",),
    },
    "dataflow": {
        "combiners": (),
        "windows": (),
        "triggers": ("combiners", "windows"),
        "step": ("triggers",),
        TOP: ("step",),
    },
    "tools": {
        "terminal": (),
        "commands": ("terminal",),
        TOP: ("terminal",),
    },
    "testing": {
        "oracles": (),
        "servers": (),
        "spark_code": (),
        "faults": ("servers",),
        "fixtures": ("faults",),
        "processes": ("fixtures",),
        "transcripts": ("fixtures", "oracles"),
        "simulation": ("fixtures", "oracles"),
        TOP: ("processes", "transcripts", "simulation", "spark_code"),
    },
}
"""
Which sub-rooms each sub-room of a room rests on. It may import from those, from what they rest on, and from
itself; imports for type checking count. A new sub-room is refused until it has its place here.
"""

STATESTORE_TOP: Final = ("opening", "store", "view")
"""The modules of `statestore/` that lie above its sub-rooms; the other ones lie below."""

ROOM_FILES_MAX: Final = 14
SUB_ROOM_FILES_MAX: Final = 20
"""How many modules a reader should have to look through, besides ``__init__``."""

BANNED: Final = {
    "time": "take a Clock",
    "random": "take an Rng",
    "uuid": "take an Rng and use token()",
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

WORDS: Final = {
    r"nobody": "say who does not: no process, no caller",
    r"whoever|whomever|whosever": "say who: the caller, the process that",
    r"somebody|everybody|anybody": "say who: another process, each caller, any thread",
    r"anew": "again, from the start",
    r"culprits?": "name what is wrong",
    r"becomes? of|became of": "what happens to",
    r"beside|besides": "next to, alongside, while; except, also",
    r"news": "new, unseen; a change",
    r"(?:is|are|was) still near": "name where",
    r"lets? go|letting go": "release, drop",
    r"takes? (?:\w+ ){0,4}garbage away": "collect garbage",
    r"all the same": "anyway, still",
    r"befalls?|befell": "happens to",
    r"makes? garbage": "leave garbage",
    r"(?:can|could|to) be had": "is available",
    r"goes? on with|gone on with|went on with": "continue, resume",
    r"as long as it likes": "without a limit",
    r"folds?|folded|folding": "compaction, compact",
}
"""Words of no field, and what to write in their place; as regular expressions, whole words, also of names, in any case."""

WORDS_KEPT: Final[dict[str, str]] = {
    "CHANGELOG.md": ".*",  # what earlier versions called things
    "tests/tidy.py": ".*",  # names them
    "tests/test_tidy.py": ".*",  # plants them
    "executor/replay/repair_plan.py": "fold",  # what stores of 0.1 call the commit of a compaction
    "millpond/cli/terminal/output.py": "fold",  # an argument of Rich's
    "executor/windows/window_state.py": "news",  # a key in rows, which are read for ever
    "executor/windows/key_windows.py": "news",  # the same
    "tests/unit/executor/windows/test_stream.py": "news",  # the same
    "tests/unit/executor/windows/test_window_states.py": "news",  # the same
    "tests/unit/executor/windows/test_retractions.py": "news",  # the same
    "millpond/testing/simulation/fault.py": "news",  # the name of a fault, which stored seeds have
    "millpond/testing/simulation/line.py": "news",  # the same
    "tests/planted/README.md": "news",  # the same
    "tests/unit/executor/interval/test_letter_value.py": "fold",  # an argument of Python's times
    "millpond/testing/servers/postgresql.py": "nobody",  # an account of the system
    "millpond/testing/simulation/process.py": "nobody",  # part of a trace that seeds are known by
}
"""Files in which some of them stand for a reason; as regular expressions."""

FUNCTION_LINES_MAX: Final = 70
FILE_LINES_MAX: Final = 500
TEST_FILE_LINES_MAX: Final = 1_000
DOCUMENT_LINE_MAX: Final = 120

_SYSTEM: Final = "statestore/system.py"
MAY_SKIP: Final = {
    "tests/conformance/test_leases.py": "a Docker engine",
    "tests/fault/test_full_disk.py": "the right to mount a file system",
    "tests/fault/test_power_cuts.py": "the right to mount a file system",
}
"""The files with tests that a machine may be unable to run, and what it lacks then."""

_LEFTOVER: Final = re.compile(r"\b(?:FIX" + "ME|TO" + "DO|XX" + r"X|HA" + r"CK)\b")
_TEXT_SUFFIXES: Final = (".py", ".md", ".toml", ".yaml", ".yml", ".mako", ".sql", ".sh")
_CODE_FOLDERS: Final = (*ROOMS, "millpond", "tests", "benchmarks", "examples", "docs", ".ci")

_NOT_READ: Final = (*(f"millpond/{room}/" for room in ROOMS), "tests/format/v")
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
        """The first part of the path."""
        return self.path.partition("/")[0]

    @property
    def module(self) -> str:
        """The module's name below ``millpond``; that of a package for its ``__init__``."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_package_code(self) -> bool:
        """Whether the file is part of what is installed."""
        return self.path.endswith(".py") and self.room in (*ROOMS, "millpond")

    def tree(self) -> ast.Module:
        """The syntax tree; that of an empty module if this is not Python."""
        return _parsed(self)[0]

    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return _parsed(self)[1]

    def finding(self, node: ast.AST, message: str) -> Finding:
        """A violation at a node of the tree."""
        return Finding(self.path, getattr(node, "lineno", 1), message)


@lru_cache(maxsize=1)
def _parsed(source: Source) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    # One file is enough for all rules that look at it in turn.
    tree = ast.parse(source.text if source.path.endswith(".py") else "", source.path)
    return tree, tuple(ast.walk(tree))


def repository_sources(root: Path = ROOT) -> Iterator[Source]:
    """Every text file that is ours: code, tests, documents, and the files at the root."""
    at_root = [path for path in sorted(root.iterdir()) if path.is_file()]
    in_folders = [path for folder in _CODE_FOLDERS for path in sorted((root / folder).rglob("*"))]
    for path in (*at_root, *in_folders):
        is_text = path.suffix in _TEXT_SUFFIXES or path.name == "Makefile" or path.parent.name == ".ci"
        if is_text and path.is_file():
            relative = path.relative_to(root).as_posix()
            if not relative.startswith(_NOT_READ):
                yield Source(relative, path.read_bytes().decode())


# ------------------------------------------------------------------------------ what a file brings in


@lru_cache(maxsize=1)
def _imported_names(source: Source) -> dict[str, str]:
    """The full names behind the local names that the module's imports make."""
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
    """The full name behind an expression, by what the module imported; empty if it is no name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


@lru_cache(maxsize=1_000)
def _imports(source: Source) -> tuple[tuple[ast.stmt, str], ...]:
    """Each import with the dotted name of what it brings in; ``import x`` brings in ``x.``."""
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
    """The room and the sub-room of a module of the package, given by its name below ``millpond``.

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
    """The sub-rooms that one may import from: itself, and all below."""
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


def crowded_rooms(sources: Iterable[Source]) -> Iterator[Finding]:
    """No folder of the package has more files than a reader can look through."""
    folders = Counter(
        source.path.rpartition("/")[0]
        for source in sources
        if source.is_package_code and not source.path.endswith("/__init__.py")
    )
    for folder, files in sorted(folders.items()):
        at_most = SUB_ROOM_FILES_MAX if "/" in folder else ROOM_FILES_MAX
        if files > at_most and folder != "migrations/versions":
            yield Finding(folder, 1, f"{files} files, {at_most} at most: it is several rooms")


# ------------------------------------------------------------------------------ what it does


def bare_asserts(source: Source) -> Iterator[Finding]:
    """Package code states facts with `check`, which ``python -O`` does not remove."""
    if source.is_package_code and source.room != "testing":
        for node in source.nodes():
            if isinstance(node, ast.Assert):
                yield source.finding(node, "bare assert vanishes under -O: use statestore.check.check")


def prints(source: Source) -> Iterator[Finding]:
    """Package code logs; only the command line prints."""
    if source.is_package_code and source.room != "tools":
        for node in source.nodes():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield source.finding(node, "print belongs to tools/: log it, or return it")


def swallowed_errors(source: Source) -> Iterator[Finding]:
    """No handler takes every error and says nothing."""
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


# ------------------------------------------------------------------------------ how it reads


def long_functions(source: Source) -> Iterator[Finding]:
    """No function is longer than a screen; its docstring does not count."""
    for node in source.nodes():
        if isinstance(node, _FUNCTIONS):
            lines = _line_count(node) - _docstring_line_count(node)
            if lines > FUNCTION_LINES_MAX:
                yield source.finding(node, f"`{node.name}` has {lines} lines, {FUNCTION_LINES_MAX} at most")


def _line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstring_line_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return _line_count(node.body[0]) if ast.get_docstring(node, clean=False) is not None else 0


def long_files(source: Source) -> Iterator[Finding]:
    """No Python file grows into an engine; a file of tests may hold twice as many facts."""
    lines = source.text.count("\n")
    at_most = TEST_FILE_LINES_MAX if source.room == "tests" else FILE_LINES_MAX
    if source.path.endswith(".py") and lines > at_most:
        yield Finding(source.path, 1, f"{lines} lines, {at_most} at most: one noun a file")


def long_document_lines(source: Source) -> Iterator[Finding]:
    """Documents are read in editors and diffs, too: only table rows and lone addresses are wider."""
    if source.path.endswith(".md"):
        for number, line in enumerate(source.text.splitlines(), start=1):
            is_address = "://" in line and " " not in line.strip()
            if len(line) > DOCUMENT_LINE_MAX and not line.lstrip().startswith("|") and not is_address:
                yield Finding(source.path, number, f"{len(line)} characters, {DOCUMENT_LINE_MAX} at most")


def leftovers(source: Source) -> Iterator[Finding]:
    """What is left to do stands in an issue, not in a file."""
    for number, line in enumerate(source.text.splitlines(), start=1):
        if found := _LEFTOVER.search(line):
            yield Finding(source.path, number, f"leftover {found.group()}")


def ragged_lines(source: Source) -> Iterator[Finding]:
    """No line ends in spaces, and a file ends with one line feed: then a change shows only what it changes."""
    for number, line in enumerate(source.text.split("\n"), start=1):
        if line != line.rstrip():
            yield Finding(source.path, number, "spaces at the end of the line")
    if source.text and (not source.text.endswith("\n") or source.text.endswith("\n\n")):
        yield Finding(source.path, source.text.count("\n"), "the file does not end with one line feed")


# Only where a word begins: to try them all at every letter takes seven times as long.
_DIALECT: Final = re.compile(
    rf"\b(?=\w)(?:{'|'.join(f'(?P<w{number}>{words})' for number, words in enumerate(WORDS))})\b",
    re.IGNORECASE,
)


def dialect(source: Source) -> Iterator[Finding]:
    """The field's terms, in plain English: no word of `WORDS`, in sentences or in names with underscores."""
    kept = WORDS_KEPT.get(source.path, "(?!)")
    for match in _DIALECT.finditer(source.text.replace("_", " ")):
        if re.fullmatch(kept, match.group(), re.IGNORECASE):
            continue
        instead = list(WORDS.values())[int((match.lastgroup or "w0")[1:])]
        number = source.text.count("\n", 0, match.start()) + 1
        yield Finding(source.path, number, f"`{match.group()}`: {instead}")


def missing_docstrings(source: Source) -> Iterator[Finding]:
    """Every public name of the package says what it is for."""
    if not source.is_package_code or source.path.startswith("migrations/versions/"):
        return
    tree = source.tree()
    if tree.body and ast.get_docstring(tree) is None:
        yield source.finding(tree, "the module has no docstring")
    yield from _undocumented(source, tree.body, "")


def _undocumented(source: Source, body: list[ast.stmt], prefix: str) -> Iterator[Finding]:
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            name = f"{prefix}{node.name}"
            if ast.get_docstring(node) is None and not _says_it_elsewhere(node):
                yield source.finding(node, f"`{name}` has no docstring")
            if isinstance(node, ast.ClassDef):
                yield from _undocumented(source, node.body, f"{name}.")


def _says_it_elsewhere(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """Overloads, overrides and setters are documented with what they belong to."""
    marks = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(marks & {"overload", "override", "setter"})


def tests_state_their_fact(source: Source) -> Iterator[Finding]:
    """Every test has a docstring of one sentence: the fact that it proves."""
    is_test_file = source.room == "tests" and source.path.rpartition("/")[2].startswith("test_")
    for node in source.nodes() if is_test_file else ():
        if isinstance(node, _FUNCTIONS) and node.name.startswith("test_"):
            docstring = ast.get_docstring(node)
            if docstring is None:
                yield source.finding(node, f"`{node.name}` does not say which fact it proves")
            elif "\n\n" in docstring:
                yield source.finding(node, f"`{node.name}` says more than one fact")


def skips(source: Source) -> Iterator[Finding]:
    """A test brings along what it needs: it is skipped for what `MAY_SKIP` names, and for nothing else."""
    if source.path in MAY_SKIP:
        return
    names = _imported_names(source)
    skipping = {"pytest.skip", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif"}
    for node in source.nodes():
        if isinstance(node, ast.Attribute) and _dotted(node, names) in skipping:
            yield source.finding(node, "bring along what the test needs, or name it in MAY_SKIP")


RULES: Final[tuple[Callable[[Source], Iterator[Finding]], ...]] = (
    banned_modules,
    arrows_point_down,
    sub_room_arrows_point_down,
    bare_asserts,
    prints,
    swallowed_errors,
    unbounded_memory,
    long_functions,
    long_files,
    long_document_lines,
    leftovers,
    ragged_lines,
    missing_docstrings,
    tests_state_their_fact,
    skips,
    dialect,
)
"""All rules about one file, run over every source."""

WHOLE_RULES: Final[tuple[Callable[[Iterable[Source]], Iterator[Finding]], ...]] = (circles, crowded_rooms)
"""All rules about the repository as a whole."""
