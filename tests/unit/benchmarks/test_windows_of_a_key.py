"""The benchmark of a key's windows, with few windows."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks import windows_of_a_key


@pytest.mark.parametrize("shape", windows_of_a_key.SHAPES)
def test_each_window_is_emitted_once(shape: str) -> None:
    """Each record opens its own window."""
    figure = windows_of_a_key.run_once(shape, 50)

    # With sliding windows the last record's second window is one more.
    assert figure["panes"] == 50 + (shape == "sliding")
    assert figure["cpu_s"] > 0


def test_figures_are_drawn(tmp_path: Path) -> None:
    figures = [{"shape": "fixed", "windows": count, "cpu_s": count / 1_000} for count in (10, 100)]
    windows_of_a_key.draw(figures, tmp_path / "windows.png")

    with Image.open(tmp_path / "windows.png") as picture:
        assert picture.width > 500
