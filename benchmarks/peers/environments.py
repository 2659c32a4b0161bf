"""Virtual environments of the engines that Millpond does not depend on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

_REQUIREMENTS: Final = Path(__file__).resolve().parent / "requirements"
_TIMEOUT_S: Final = 900


class UnavailableError(Exception):
    """An engine could not be installed or run; the message is the reason."""


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made or renewed if its requirements have changed.

    Args:
        name: the file in ``requirements/`` without its suffix.
        folder: the folder of all environments.

    Raises:
        UnavailableError: pip refused.
    """
    requirements = _REQUIREMENTS / f"{name}.txt"
    environment = (folder / name).absolute()
    python, installed = environment / "bin" / "python", environment / "installed.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if installed.is_file() and installed.read_text(encoding="utf-8") == wanted:
        return python
    _checked([sys.executable, "-m", "venv", "--clear", str(environment)])
    _checked([str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)])
    installed.write_text(wanted, encoding="utf-8")
    return python


def _checked(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"installation took longer than {_TIMEOUT_S} s") from None
    if done.returncode != 0:
        raise UnavailableError(f"installation failed: {last_line(done.stderr)}")


def last_line(text: str) -> str:
    """Return the last line with text, or ``no message``."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
