"""The features that a transcript exercises, and a small set of transcripts with all of them.

A run on Spark costs seconds, a run in memory milliseconds. So each commit runs a sample on Spark, chosen by
features, and all documents run on both runners periodically.
"""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

_DEFAULTS: Final = {
    "window_fn": "GlobalWindows",
    "trigger_fn": "Default",
    "accumulation_mode": "accumulating",
    "timestamp_combiner": "OUTPUT_AT_EOW",
    "closing": "never",
    "emit_empty_on_time": True,
    "asked": "bundle",
    "incremental": False,
    "combine": "ToList",
}
_MERGING: Final = "Sessions"


def constructor_names(text: str) -> frozenset[str]:
    """Return the names of the library in a constructor's text.

    Example:
        >>> sorted(constructor_names("Repeatedly(AtPeriod(0, 60, event))"))
        ['AtPeriod', 'Repeatedly']
    """
    return frozenset(name for name, _ in _nested(text))


def _nested(text: str) -> Iterator[tuple[str, str]]:
    """Yield each name with the name of the constructor that contains it."""
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
        # Words such as `event` and `days`, in lower case or capitals, are arguments, not constructors.
        if name != name.lower() and name != name.upper():
            yield name, parent


def features_of(document: Mapping[str, Any]) -> frozenset[Hashable]:
    """Return the features of a document: constructors, choices, combinations, steps, fields of panes.

    Args:
        document: as read from YAML, with constructors that can be parsed.
    """
    said = _DEFAULTS | {name: document[name] for name in _DEFAULTS if name in document}
    triggers, windows = list(_nested(str(said["trigger_fn"]))), constructor_names(str(said["window_fn"]))
    mode = said["accumulation_mode"]
    features: set[Hashable] = {("constructor", name) for name in windows | {name for name, _ in triggers}}
    features |= {(choice, said[choice]) for choice in _DEFAULTS if choice not in ("window_fn", "trigger_fn")}
    features |= {("mode of windows", mode, name) for name in windows & {_MERGING, "SlidingWindows"}}
    features |= {("in AfterWatermark", name) for name, parent in triggers if parent == "AfterWatermark"}
    if _MERGING in windows:
        features |= {("merges", name) for name, parent in triggers if not parent}
    features.add(("lateness", bool(document.get("allowed_lateness"))))
    features |= {("fails", "error" in document)}
    features |= {("around", name) for name in ("by_arrival", "shift", "then") if document.get(name)}
    features.add(("horizon", str(document.get("late_data_horizon", 0)).isalpha()))
    features |= _of_steps(document["transcript"])
    return frozenset(features)


def _of_steps(steps: Sequence[Mapping[str, Any]]) -> set[Hashable]:
    features: set[Hashable] = set()
    for step in steps:
        ((action, argument),) = step.items()
        features.add(("step", action))
        if action == "expect":
            flags = ("early", "late", "retraction", "first", "final")
            # A transcript may be a wrong one, which is refused.
            panes = argument if isinstance(argument, list) else ()
            features |= {("pane", flag, pane[flag]) for pane in panes for flag in flags if flag in pane}
        if action == "watermark":
            features.add(("watermark", "by percentile" if isinstance(argument, dict) else "low"))
        if action == "input":
            fields = (name for element in argument if isinstance(element, dict) for name in element)
            features |= {("element", name) for name in fields}
        if action == "signal" and isinstance(argument, dict):
            features |= {("signal", name) for name in argument}
    return features


def cover(documents: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a small set of short documents that has every feature of the given ones.

    The documents are in their order, and the same for the same input.
    """
    features = [features_of(document) for document in documents]
    missing = {feature for document_features in features for feature in document_features}
    chosen: set[int] = set()
    while missing:
        best = max(
            range(len(documents)),
            key=lambda index: len(features[index] & missing) / (5 + _cost(documents[index])),
        )
        chosen.add(best)
        missing -= features[best]
    return [documents[index] for index in sorted(chosen)]


def _cost(document: Mapping[str, Any]) -> int:
    """Return the number of rounds: one per step, and one per distinct time of the clock."""
    steps = [next(iter(step)) for step in document["transcript"]]
    return len(steps) + steps.count("clock")
