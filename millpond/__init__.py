"""Millpond: a storage-centric transactional state engine for streams, on Delta Lake.

Example::

    import millpond as mp

    class Counter(mp.Computation):
        def process_record(self, context, record):
            context.state.set((context.state.get() or 0) + 1)

``__init__.pyi`` lists the public names, each once. Type checkers read it as a stub; at run time ``lazy_loader`` derives
``__all__`` from it and imports the module of a name when the name is first used. So ``import millpond`` stays cheap in
a process that needs few of them, a Spark worker for example. Names that fewer pipelines need are in `millpond.windows`,
`millpond.spark`, `millpond.types` and `millpond.testing`; all other modules are internal and may change.
"""

import ast
import importlib
import warnings
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import lazy_loader

_PUBLIC_MODULES: Final = ("windows", "types", "spark", "testing")

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Return a public name; one that has moved to a public module still works, with a warning that names its home."""
    try:
        return _listed(name)
    except AttributeError:
        home = _homes().get(name)
        if home is None:
            raise
    warnings.warn(f"mp.{name} has moved: use mp.{home}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)  # of the package


@lru_cache(maxsize=1)
def _homes() -> dict[str, str]:
    # Read, not imported: `from millpond import migrations` asks for this name before the submodule is imported.
    return {
        alias.name: home
        for home in _PUBLIC_MODULES
        for node in ast.parse(_source(home)).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _source(home: str) -> str:
    path = Path(__file__).parent / home
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
