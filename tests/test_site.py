"""The documentation as a site: no warnings, no foreign resources, no missing public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pytest

import millpond as mp
from tests.tidy import ROOT

pytestmark = pytest.mark.slow

_DIRECTIVE: Final = re.compile(r"^::: millpond\.([\w.]+)$", re.MULTILINE)
_STYLE_URL: Final = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


@dataclass
class Page(HTMLParser):
    """The links and the resources of an HTML page."""

    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Record a tag's target: readers follow links, while everything else is loaded with the page."""
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif tag == "link":
            self.loads.append(given["href"])
        else:
            self.loads += [given[name] for name in ("src", "srcset", "data") if name in given]
        if "mermaid" in given.get("class", ""):
            self.loads.append("https://mermaid")


def _read(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def faults_of(site: Path) -> Iterator[str]:
    """Return the foreign resources of a site, and its dead links."""
    pages = {path: _read(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        yield from (f"{name} loads {url}" for url in page.loads if _is_elsewhere(url))
        for url in (*page.links, *page.loads):
            if (
                not _is_elsewhere(url)
                and not url.startswith(("data:", "mailto:"))
                and not _leads(pages, site, path, url)
            ):
                yield f"{name} leads to {url}"
    for path in site.rglob("*.css"):
        for one, other in _STYLE_URL.findall(path.read_text(encoding="utf-8")):
            if _is_elsewhere(one or other):
                yield f"{path.name} loads {one or other}"


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def _leads(pages: dict[Path, Page], site: Path, path: Path, url: str) -> bool:
    parts = urlsplit(url)
    page = (
        site / unquote(parts.path).lstrip("/")
        if parts.path.startswith("/")
        else path.parent / unquote(parts.path)
    )
    target = path if not parts.path else page.resolve()
    if target.is_dir():
        target /= "index.html"
    return target.exists() and (not parts.fragment or unquote(parts.fragment) in pages[target].anchors)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    """Each link within the site leads somewhere, too."""
    assert list(faults_of(site)) == []


def test_site_has_the_documents(site: Path) -> None:
    names = ("index", "tutorial", "how-to/index", "reference/pipeline", "contributing", "changelog", "safety")

    assert all((site / f"{name}.html").is_file() for name in names)


@pytest.mark.parametrize(
    "html",
    [
        "<script src='https://cdn.org/a.js'></script>",
        "<link rel='stylesheet' href='//fonts.org/a.css'>",
        "<img src='http://x.org/a.png'>",
        "<pre class='mermaid'></pre>",
        "<a href='missing.html'>m</a>",
        "<a href='#missing'>m</a>",
        "<a href='b.html#missing'>m</a>",
        "<img src='missing.png'>",
    ],
)
def test_foreign_resource_and_dead_link_are_found(html: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text("<p id='there'>")

    assert len(list(faults_of(tmp_path))) == 1


def test_correct_page_has_no_fault(tmp_path: Path) -> None:
    """Links to other servers are not loaded with the page."""
    (tmp_path / "a.html").write_text(
        "<p id='here'><a href='#here'></a><a href='b.html#there'></a><a href='https://x.org'></a><img src='c%20d.png'>"
    )
    (tmp_path / "b.html").write_text("<p id='there'>")
    (tmp_path / "c d.png").touch()

    assert list(faults_of(tmp_path)) == []


def test_foreign_font_of_a_style_sheet_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import 'https://fonts.org/a.css'; p { background: url(//x.org/a.png) }")

    assert len(list(faults_of(tmp_path))) == 2


def _missing(names: list[str], pages: str) -> set[str]:
    documented = _DIRECTIVE.findall(pages)
    assert len(set(documented)) == len(documented), "a name is documented twice"
    return set(names) - {name.rpartition(".")[2] for name in documented}


def test_reference_has_every_public_name() -> None:
    modules = {"spark", "testing", "types", "windows"}
    public = [
        *(set(mp.__all__) - modules),
        *(name for home in modules - {"testing"} for name in _names_of(home)),
    ]
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))

    assert not _missing(public, pages)
    assert _missing([*public, "NewName"], pages) == {"NewName"}


def _names_of(home: str) -> list[str]:
    return [name for name in vars(getattr(mp, home)) if not name.startswith("_")]


def _script(path: str) -> Any:
    """Import a script of the documents; ``docs/`` is no package."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_diagrams_equal_their_scripts_output() -> None:
    for name, draw in _script("docs/pictures/diagrams.py").DIAGRAMS.items():
        assert (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8") == draw()


def test_command_line_page_equals_the_commands_help() -> None:
    """Run ``python docs/site/command_line.py`` to write it again."""
    script = _script("docs/site/command_line.py")

    assert script.PAGE.read_text(encoding="utf-8") == script.page()
