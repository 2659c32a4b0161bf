"""The planted bugs: each applies to the current code, and quick ones are found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_FOLDER = Path(__file__).parent / "planted"
_SPEC = importlib.util.spec_from_file_location("planted_find", _FOLDER / "find.py")
if _SPEC is None or _SPEC.loader is None:
    raise ImportError(_FOLDER)
planted = importlib.util.module_from_spec(_SPEC)
sys.modules["planted_find"] = planted
_SPEC.loader.exec_module(planted)

PLANTS = planted.plants()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_planted_bug_applies(plant: planted.Plant) -> None:
    """The table of planted bugs must name the check that finds it."""
    table = (_FOLDER / "README.md").read_text(encoding="utf-8")

    assert planted.applies(plant) == ""
    assert f"| `{plant.name}` | {plant.breaks} | `{plant.found_by}` |" in table


def test_at_least_twenty_bugs_are_planted() -> None:
    """Every run searches for some of them."""
    assert len(PLANTS) >= 20
    assert sum(plant.quick for plant in PLANTS) >= 5


@pytest.mark.parametrize("plant", [p for p in PLANTS if p.quick], ids=lambda plant: plant.name)
def test_quick_bug_is_found(plant: planted.Plant) -> None:
    finding = planted.find(plant)

    assert finding.found, finding.output[-2_000:]


def test_patch_that_breaks_nothing_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the search could not fail."""
    harmless = (
        "Breaks: I0: nothing\nFound-by: simulate --seeds 1 --steps 5\n\n"
        "diff --git a/millpond/testing/simulation/__init__.py b/millpond/testing/simulation/__init__.py\n"
        "--- a/millpond/testing/simulation/__init__.py\n+++ b/millpond/testing/simulation/__init__.py\n"
        "@@ -1,1 +1,2 @@\n"
        ' """The simulator: the whole engine in one thread, from one seed, with faults (harness H3)."""\n+HARMLESS = True\n'
    )
    (tmp_path / "harmless.patch").write_text(harmless)
    monkeypatch.setattr(planted, "FOLDER", tmp_path)
    (plant,) = planted.plants()

    assert planted.applies(plant) == ""
    finding = planted.find(plant)
    assert not finding.found
    assert "1 passed, 0 failed" in finding.output


def test_several_bugs_are_searched_for_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search fails if one is not found."""

    def find(plant: planted.Plant) -> planted.Finding:
        return planted.Finding(plant=plant, found="" if plant is missed else "seed 1: I0", output="silence")

    missed, known = PLANTS[1], [plant.name for plant in PLANTS[:3]]
    monkeypatch.setattr(planted, "plants", lambda: PLANTS)
    monkeypatch.setattr(planted, "find", find)

    assert planted.main(known, workers=2) == 1
    told = capsys.readouterr().out.splitlines()
    assert sorted(told[:-1]) == [
        f"{name}: {'NOT FOUND' if name == missed.name else 'seed 1: I0'}" for name in known
    ]
    assert told[-1] == "2 of 3 planted bugs found"
    assert planted.main(known[:1], workers=2) == 0
