"""The benchmark of a key's windows measures what it says, at sizes that cost a second."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import windows_of_a_key


@pytest.mark.parametrize("shape", windows_of_a_key.SHAPES)
def test_every_window_is_shown_once(shape: str) -> None:
    """Each record of the one key opens a window of its own, and each window is shown."""
    figure = windows_of_a_key.run_once(shape, 50)

    # Where windows slide, the last record's second window is one more.
    assert figure["panes"] == 50 + (shape == "sliding")
    assert figure["cpu_s"] > 0


def test_the_figures_are_drawn(tmp_path: Path) -> None:
    """The picture is drawn from the figures."""
    figures = [{"shape": "fixed", "windows": count, "cpu_s": count / 1_000} for count in (10, 100)]
    windows_of_a_key.draw(figures, tmp_path / "windows.png")

    with Image.open(tmp_path / "windows.png") as picture:
        assert picture.width > 500
