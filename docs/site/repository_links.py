"""Links from the documents to files of the repository, made into pages of the site.

On a code host a document may link to any file. The site has the same links: each file that a document
links to outside of ``docs/`` becomes a page, a Markdown file as it is and any other as a listing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parent.parent.parent

PAGES: Final = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Documents at the root that have a place in the navigation."""

_LINK: Final = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every file of the repository that a document links to."""
    documents = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    made = {uri: ROOT / name for name, uri in PAGES.items()}
    waiting = [*documents, *made.values()]
    while waiting:
        found = _outside(waiting.pop())
        waiting += [path for uri, path in found.items() if uri not in made]
        made |= found
    for uri, path in sorted(made.items()):
        files.append(File.generated(config, uri, content=_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the page's links out of ``docs/`` lead to the pages that stand for those files."""
    source = _source_of(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        uri = _uri_of(source, target)
        if uri is None:
            return link.group()
        return before + os.path.relpath(uri, PurePosixPath(page.file.src_uri).parent) + after

    parts = re.split(f"({_FENCE.pattern})", markdown, flags=_FENCE.flags)
    return "".join(part if part.startswith("```") else _LINK.sub(moved, part) for part in parts)


def _source_of(uri: str) -> Path:
    """Return the repository file that is the source of a page."""
    for name, known in PAGES.items():
        if uri == known:
            return ROOT / name
    if uri.startswith("repository/"):
        return ROOT / uri.removeprefix("repository/").removesuffix(".page.md")
    return ROOT / "docs" / uri


def _uri_of(source: Path, target: str) -> str | None:
    """Return the page that a link leads to; ``None`` if the link needs no change."""
    if "://" in target:
        return None
    path = (source.parent / target).resolve()
    if path.is_dir():
        path /= "README.md"
    if not path.is_file():
        return None
    if path.is_relative_to(ROOT / "docs"):
        is_at_home = source.is_relative_to(ROOT / "docs")
        return None if is_at_home else path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return PAGES.get(name) or f"repository/{name}{'' if name.endswith('.md') else '.page.md'}"


def _outside(document: Path) -> dict[str, Path]:
    """Return the pages that stand for link targets outside of ``docs/``."""
    if document.suffix != ".md":
        return {}
    found: dict[str, Path] = {}
    for _, target, _ in _LINK.findall(_FENCE.sub("", document.read_text(encoding="utf-8"))):
        uri = _uri_of(document, target)
        if uri is not None and (uri.startswith("repository/") or uri in PAGES.values()):
            found[uri] = _source_of(uri)
    return found


def _page(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
