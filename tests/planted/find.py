"""Plants each bug of this folder in a copy of the tree and runs the check that should find it.

    python tests/planted/find.py all            # every planted bug
    python tests/planted/find.py quick          # the bugs that `make test` looks for
    python tests/planted/find.py blind_retry    # one
    python tests/planted/find.py list
    python tests/planted/find.py --workers 1 all   # one after the other; else as many at once as there are processors

A patch begins with the broken promise and the check that finds it::

    Breaks: I2: a commit whose reply was lost is made a second time
    Found-by: simulate --faults reply_lost --seeds 20
    Quick: yes

``simulate`` finds a bug by a broken promise, and its line names the seed; ``pytest`` by a failing
assertion. Whatever else goes wrong (the patch does not apply, the code does not import) is not a find.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent
ROOT: Final = FOLDER.parent.parent

_HEADER: Final = re.compile(r"^(Breaks|Found-by|Quick): (.+)$", re.MULTILINE)
_FOUND: Final = re.compile(r"^seed (\S+): (I\d+: .*?) \| commit", re.MULTILINE)
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_LEFT_OUT: Final = shutil.ignore_patterns(
    ".git",
    ".venv",
    "build",
    # Copy compiled modules, which saves a second, except files that a process is just writing.
    "*.pyc.*",
    ".*_cache",
    ".hypothesis",
    "spark-warehouse",
    "metastore_db",
    "docs",
)
_SIGNS: Final = ("AssertionError", "DID NOT RAISE", "E       assert ")
_TIMEOUT_S: Final = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A planted bug.

    Attributes:
        name: of its patch.
        breaks: the promise, and how.
        found_by: what finds it: ``simulate`` or ``pytest`` with arguments.
        quick: whether `make test` looks for it.
    """

    name: str
    breaks: str
    found_by: str
    quick: bool

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.patch"

    def command(self) -> list[str]:
        """Return the command to run in the copy."""
        tool, *arguments = shlex.split(self.found_by)
        if tool == "simulate":
            words = ["-m", "millpond.testing.simulate", "--fail-fast", "--workers", "1", *arguments]
            return [sys.executable, *words]
        return [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:randomly",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of looking for a planted bug.

    Attributes:
        plant: which.
        found: how it showed; "" if it did not.
        output: of the command.
    """

    plant: Plant
    found: str
    output: str

    def __str__(self) -> str:
        return f"{self.plant.name}: {self.found or 'NOT FOUND'}"


def plants() -> list[Plant]:
    """Return every planted bug, by name."""
    parsed = []
    for path in sorted(FOLDER.glob("*.patch")):
        fields = dict(_HEADER.findall(path.read_text(encoding="utf-8").partition("\ndiff ")[0]))
        parsed.append(
            Plant(
                name=path.stem,
                breaks=fields["Breaks"],
                found_by=fields["Found-by"],
                quick=fields.get("Quick") == "yes",
            )
        )
    return parsed


def applies(plant: Plant, tree: Path = ROOT) -> str:
    """Return the reason why the patch does not apply to a tree; "" if it applies."""
    return _git_apply(plant, tree, "--check")


def find(plant: Plant) -> Finding:
    """Plant the bug in a copy of the tree, and look for it."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=_LEFT_OUT, copy_function=_link)
        error = _git_apply(plant, tree)
        if error:
            return Finding(plant=plant, found="", output=error)
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        ended = subprocess.run(
            plant.command(),
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    output = ended.stdout + ended.stderr
    return Finding(plant=plant, found=_how(plant, ended.returncode, ended.stdout), output=output)


def _link(source: str, target: str) -> None:
    """Link a file: git replaces the files that it patches, and nothing else writes to one."""
    try:
        os.link(source, target)
    except OSError:
        # The temporary folder is on another file system.
        shutil.copy2(source, target)


def _how(plant: Plant, code: int, output: str) -> str:
    if code != 1:
        return ""
    if plant.found_by.startswith("simulate"):
        match = _FOUND.search(output)
        return f"seed {match[1]}: {match[2]}" if match else ""
    match = _FAILED.search(output)
    failed = any(sign in output for sign in _SIGNS)
    return f"{match[1]} fails" if match and failed else ""


def _git_apply(plant: Plant, tree: Path, *options: str) -> str:
    ended = subprocess.run(
        ["git", "apply", "-C1", "--recount", *options, str(plant.path)],
        cwd=tree,
        # Without a ceiling, git would treat the copy as a part of a surrounding repository.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stderr if ended.returncode else ""


def find_all(wanted: Iterable[Plant], workers: int = 1) -> Iterator[Finding]:
    """Look for several bugs in parallel; yield each as its search ends."""
    with ThreadPoolExecutor(workers) as pool:
        for search in as_completed([pool.submit(find, plant) for plant in wanted]):
            yield search.result()


def main(names: Iterable[str], workers: int = 1) -> int:
    """Search for the named bugs in parallel; the exit code is 0 if all were found."""
    known = {plant.name: plant for plant in plants()}
    wanted: list[Plant] = []
    for name in names:
        if name == "list":
            print(*(f"{plant.name:36} {plant.breaks}" for plant in known.values()), sep="\n")
            return 0
        if name in {"all", "quick"}:
            wanted += [plant for plant in known.values() if plant.quick or name == "all"]
        elif name in known:
            wanted.append(known[name])
        else:
            print(f"there is no planted bug {name!r}; there are: {', '.join(known)}", file=sys.stderr)
            return 2
    count = 0
    for finding in find_all(wanted, workers):
        print(finding, flush=True)
        count += bool(finding.found)
        if not finding.found:
            print(finding.output[-2_000:], file=sys.stderr)
    print(f"{count} of {len(wanted)} planted bugs found")
    return 0 if count == len(wanted) > 0 else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plant bugs and look for them.")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("names", nargs="*", default=["all"], help="planted bugs, 'all', 'quick' or 'list'")
    given = parser.parse_args()
    sys.exit(main(given.names, given.workers))
