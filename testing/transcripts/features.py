"""
What a transcript touches, and few transcripts that together touch all that many do.

A run on Spark costs seconds where one in memory costs milliseconds; so every commit is held to a
sample there, chosen by what it touches, and all documents to both runners now and then.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

__all__ = ["constructor_names", "cover", "features_of"]

_DEFAULTS: Final = {
    "window_fn": "GlobalWindows",
    "trigger_fn": "Default",
    "accumulation_mode": "accumulating",
    "timestamp_combiner": "OUTPUT_AT_EOW",
    "closing": "never",
    "emit_empty_on_time": True,
}
_MERGING: Final = "Sessions"


def constructor_names(text: str) -> frozenset[str]:
    """
    The names of the library in a constructor's text.

    Example:
        >>> sorted(constructor_names("Repeatedly(AtPeriod(0, 60, event))"))
        ['AtPeriod', 'Repeatedly']
    """
    return frozenset(name for name, _ in _nested(text))


def _nested(text: str) -> Iterator[tuple[str, str]]:
    """
    Each name with the one that it stands in.
    """
    waiting = [(ast.parse(text.strip(), mode="eval").body, "")]
    while waiting:
        node, parent = waiting.pop()
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            inner = [*node.args, *(word.value for word in node.keywords)]
            waiting += [(child, name) for child in inner]
        elif isinstance(node, ast.Name | ast.Attribute):
            name = ast.unparse(node)
        else:
            continue
        # Words such as `event` and `days` stand in lower case, or in capitals, for themselves.
        if name != name.lower() and name != name.upper():
            yield name, parent


def features_of(document: Mapping[str, Any]) -> frozenset[Hashable]:
    """
    What a document touches: constructors, choices and their combinations, steps, fields of panes.

    Args:
        document: as it was read from YAML, with constructors that can be parsed.
    """
    said = _DEFAULTS | {name: document[name] for name in _DEFAULTS if name in document}
    triggers, windows = list(_nested(str(said["trigger_fn"]))), constructor_names(str(said["window_fn"]))
    mode = said["accumulation_mode"]
    found: set[Hashable] = {("constructor", name) for name in windows | {name for name, _ in triggers}}
    found |= {(choice, said[choice]) for choice in _DEFAULTS if choice not in ("window_fn", "trigger_fn")}
    found |= {("mode of windows", mode, name) for name in windows & {_MERGING, "SlidingWindows"}}
    found |= {("in AfterWatermark", name) for name, parent in triggers if parent == "AfterWatermark"}
    if _MERGING in windows:
        found |= {("merges", name) for name, parent in triggers if not parent}
    found.add(("lateness", bool(document.get("allowed_lateness"))))
    found |= {("fails", "error" in document)}
    found |= {("around", name) for name in ("by_arrival", "shift", "then") if document.get(name)}
    found.add(("horizon", str(document.get("late_data_horizon", 0)).isalpha()))
    found |= _of_steps(document["transcript"])
    return frozenset(found)


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> set[Hashable]:
    found: set[Hashable] = set()
    for step in steps:
        ((action, argument),) = step.items()
        found.add(("step", action))
        if action == "expect":
            flags = ("early", "late", "retraction", "first", "final")
            found |= {("pane", flag, pane[flag]) for pane in argument for flag in flags if flag in pane}
        if action == "watermark":
            found.add(("watermark", "by percentile" if isinstance(argument, dict) else "low"))
        if action == "input":
            fields = (name for one in argument if isinstance(one, dict) for name in one)
            found |= {("element", name) for name in fields}
    return found


def cover(documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """
    Few and short documents that touch all that the given ones do.

    Returns:
        Some of the documents, in their order; always the same of the same.
    """
    features = [features_of(document) for document in documents]
    missing = {one for each in features for one in each}
    chosen: set[int] = set()
    while missing:
        best = max(
            range(len(documents)),
            key=lambda place: len(features[place] & missing) / (5 + _cost(documents[place])),
        )
        chosen.add(best)
        missing -= features[best]
    return [documents[place] for place in sorted(chosen)]


def _cost(document: Mapping[str, Any]) -> int:
    """
    Steps make rounds, and so does every time of the clock that nobody shares.
    """
    steps = [next(iter(step)) for step in document["transcript"]]
    return len(steps) + steps.count("clock")
