"""The tutorial and the how-to pages without Spark, run as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.statestore.leases.zookeeper_process import recorded_server
from tests.documents import Document, pages_to_run
from tests.page_run import PageError, PageRun

pytestmark = pytest.mark.slow

LOCAL = [page for page in pages_to_run() if not page.uses_spark]
# It restores the folder of a store together with its server's folder.
_WITH_THEIR_OWN_SERVER = {"docs/how-to/backups.md"}


@pytest.mark.zookeeper
@pytest.mark.parametrize("page", LOCAL, ids=lambda page: page.name)
def test_page_does_what_it_shows(page: Document, tmp_path: Path, zookeeper_hosts: str) -> None:
    shared = None if page.name in _WITH_THEIR_OWN_SERVER else zookeeper_hosts
    PageRun(page, tmp_path, zookeeper=shared).run()


def _page(folder: Path, text: str) -> PageRun:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return PageRun(Document(page), folder)


PYTHON = "```python\nprint(2)\n```\n"
FILE = "<!-- file: two.py -->\n```python\nprint(2)\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        PYTHON + "```text\n3\n```\n",
        PYTHON + "```text\n2\n2\n```\n",
        "```python\nraise ValueError\n```\n",
        "```console\n$ echo 2\n3\n```\n",
        "```console\n$ echo 2\n$ echo 3\n2\n3\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ (exit 3)\n$ echo $?\n0\n```\n",
        "```console\n$ echo ab; echo d\na…c\nd\n```\n",
        "```yaml\na: 1\n```\n",
        "```text\n2\n```\n",
        "<!-- not run: -->\n```python\n1/0\n```\n",
    ],
)
def test_page_with_a_wrong_block_is_found(text: str, tmp_path: Path) -> None:
    """The block fails, prints something else, or is run by nothing."""
    with pytest.raises(PageError):
        _page(tmp_path, text).run()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (PYTHON + "```text\n2\n```\n", 2),
        ("```python\ntwo = 2\n```\n" + "```python\nprint(two)\n```\n", 2),
        (FILE + "```console\n$ python two.py\n2\n```\n", 2),
        (FILE + "```python\nimport two\n```\n```text\n2\n```\n", 3),
        ("```console\n$ false\n$ echo $?\n1\n```\n", 1),
        ("```console\n$ echo a b c; echo d; echo e; echo f\na…c\n…\nf\n```\n", 1),
        ("```console\n$ echo a; echo b\na\n…\nb\n```\n", 1),
        ("```console\n$ echo \\\n    2\n2\n```\n", 1),
        ("<!-- not run: needs a cluster -->\n```python\n1/0\n```\n", 0),
    ],
)
def test_correct_page_passes(text: str, count: int, tmp_path: Path) -> None:
    """Output may be shortened; files, names and the folder are shared between blocks."""
    assert _page(tmp_path, text).run() == count


@pytest.mark.zookeeper
def test_page_that_fails_leaves_no_server_running(tmp_path: Path) -> None:
    """Its pipeline is abandoned."""
    text = """```python
import millpond as mp

pipeline = mp.Pipeline("clicks")
pipeline.inject("clicks", key="page", at="time").apply(mp.Computation(), name="nothing")
run = mp.LocalRunner("pond").start(pipeline)
1 / 0
```
"""
    with pytest.raises(PageError, match="ZeroDivisionError"):
        _page(tmp_path, text).run()
    server = recorded_server(tmp_path / "pond" / "zookeeper")

    assert server is None or not server.is_running()
