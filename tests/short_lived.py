"""
Options for short-lived Java processes: the optimising compiler costs more than it saves in a test.
"""

from __future__ import annotations

from typing import Final

from tests.tidy import ROOT

__all__ = ["SHORT_LIVED", "SHORT_LIVED_JAVA"]

SHORT_LIVED_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of the JVM; a demo needs two thirds of the processor time with them."""

SHORT_LIVED: Final = {"PYTHONPATH": str(ROOT), "JAVA_TOOL_OPTIONS": SHORT_LIVED_JAVA}
"""Environment of a program of this repository that a test runs, and of every JVM that it starts."""
