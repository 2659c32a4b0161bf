"""A fingerprint of a computation's code, equal in two processes that run the same code.

It covers the computation's class and those bases that are neither Millpond's nor installed, with bytecode and
attributes; the values in the instance; and functions and classes of the same module that this code names,
recursively. It ignores line numbers, comments, other imported modules, and values whose type does not show their
data. Bytecode belongs to one version of Python, so another version changes the fingerprint.
"""

from __future__ import annotations

import copyreg
import hashlib
import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

_PLAIN: Final = (str, bytes, int, float, complex, bool, type(None), type(...))
_NOT_CODE: Final = frozenset(
    [
        "__abstractmethods__",
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__orig_bases__",
        "__parameters__",
        "__qualname__",
        "__slotnames__",
        "__static_attributes__",
        "__type_params__",
        "__weakref__",
        "_abc_impl",
    ]
)
"""Attributes of every class that are not code."""

_SHARED: Final = (tuple, frozenset, CodeType)
"""Python may share equal ones or not, so each occurrence is described."""
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_DEPTH_MAX: Final = 40
"""Values that are nested deeper count by their types alone."""


def code_fingerprint(computation: object, keys: Sequence[object] = ()) -> str:
    """Return 64 hexadecimal digits for a computation's code and its key extractors of each stream."""
    description = _Description(_top(type(computation).__module__)).of((computation, list(keys)))
    return hashlib.sha256(repr(description).encode("utf-8", "surrogatepass")).hexdigest()


class _Description:
    """Describes values as nested tuples of text and numbers, in an order that does not depend on the process.

    A value that was described before is named by its number, so that cycles end. Code of ``package`` counts
    even if it is installed.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []
        self._depth = 0

    def of(self, value: object) -> object:
        if isinstance(value, Enum):
            return "enum", _name(type(value)), value.name
        if isinstance(value, _PLAIN):
            return type(value).__name__, repr(value)
        if id(value) in self._numbers:
            return "again", self._numbers[id(value)]
        if self._depth >= _DEPTH_MAX:
            return "deep", _name(type(value))
        if not isinstance(value, _SHARED):
            self._numbers[id(value)] = len(self._numbers)
            # Keep the object alive: a freed object's id could be reused, and its number with it.
            self._kept.append(value)
        self._depth += 1
        try:
            return self._described(value)
        finally:
            self._depth -= 1

    def _described(self, value: object) -> object:
        if isinstance(value, Mapping):
            # Keep the order of insertion: options written in another order are other code.
            return "mapping", _name(type(value)), [(self.of(k), self.of(v)) for k, v in value.items()]
        if isinstance(value, set | frozenset):
            # Describe each element alone: a set's order depends on the process, and numbers would depend on it.
            return "set", sorted(repr(_Description(self._package).of(element)) for element in value)
        if isinstance(value, list | tuple):
            return "sequence", _name(type(value)), [self.of(element) for element in value]
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        return self._other(value)

    def _other(self, value: object) -> object:
        if isinstance(value, MethodType):
            return "method", self.of(value.__func__), self.of(value.__self__)
        if isinstance(value, partial):
            return "partial", self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, property):
            return "property", self.of(value.fget), self.of(value.fset), self.of(value.fdel)
        if isinstance(value, staticmethod | classmethod):
            return type(value).__name__, self.of(value.__func__)
        if isinstance(value, ModuleType):
            return "module", value.__name__
        if inspect.isbuiltin(value) or isinstance(value, MemberDescriptorType):
            return "builtin", getattr(value, "__module__", None), value.__qualname__
        return "object", self.of(type(value)), self._contents(value)

    def _contents(self, value: object) -> object:
        """Return an object's attributes, or else its pickled form."""
        # Of the bases too. Asked of a base, it would leave an attribute there, for which a protocol would then ask.
        names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001
        attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
        members = (member for one in type(value).__mro__ for member in vars(one).items())
        cached = {name for name, member in members if isinstance(member, cached_property)}
        attributes |= {name: it for name, it in getattr(value, "__dict__", {}).items() if name not in cached}
        if attributes:
            return [(name, self.of(attributes[name])) for name in sorted(attributes)]
        try:
            known = copyreg.dispatch_table.get(type(value))
            reduced = value.__reduce_ex__(2) if known is None else known(value)
        except Exception:  # noqa: BLE001 - any __reduce__ may raise anything; then the type alone counts
            return None
        return reduced if isinstance(reduced, str) else [self.of(part) for part in reduced[1:3]]

    def _class(self, value: type) -> object:
        name = _name(value)
        if not self._counts(value.__module__):
            return "class", name
        own = vars(value)
        attributes = [
            (attribute, self.of(own[attribute])) for attribute in sorted(own) if attribute not in _NOT_CODE
        ]
        return "class", name, [self.of(base) for base in value.__bases__], attributes

    def _function(self, value: FunctionType) -> object:
        name = _name(value)
        if not self._counts(value.__module__):
            return "function", name
        cells = [self._cell(cell) for cell in value.__closure__ or ()]
        defaults = self.of(value.__defaults__), self.of(value.__kwdefaults__)
        named = [(one, self._global(value, one)) for one in _names(value.__code__)]
        return "function", name, self.of(value.__code__), defaults, cells, named

    def _counts(self, module: str) -> bool:
        top = _top(module)
        if top == "millpond" or (top in sys.stdlib_module_names and top != "__main__"):
            return False
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        return top == self._package or not _INSTALLED.intersection(PurePath(file).parts)

    def _cell(self, cell: Any) -> object:
        try:
            return self.of(cell.cell_contents)
        except ValueError:
            return "empty"

    def _global(self, function: FunctionType, name: str) -> object:
        """Describe a global that a function names: code and plain values of the same module are part of it."""
        if name not in function.__globals__:
            return "builtin"
        value = function.__globals__[name]
        if isinstance(value, FunctionType | type):
            is_own = value.__module__ == function.__module__
            return self.of(value) if is_own else ("elsewhere", _name(value))
        return (
            self.of(value)
            if isinstance(value, (*_PLAIN, tuple, frozenset))
            else ("global", _name(type(value)))
        )

    def _code(self, code: CodeType) -> object:
        consts = [self.of(const) for const in code.co_consts]
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        return "code", code.co_code.hex(), names, counts, consts, sys.version_info[:2]


def _names(code: CodeType) -> list[str]:
    """Return the global names that code and its nested code may refer to, in a fixed order."""
    inner: Collection[CodeType] = [const for const in code.co_consts if isinstance(const, CodeType)]
    return sorted({*code.co_names, *(name for one in inner for name in _names(one))})


def _name(value: type | FunctionType) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _top(module: str) -> str:
    return module.partition(".")[0]
