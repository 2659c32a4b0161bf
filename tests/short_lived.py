"""
How Java runs where it lives for a test: its second compiler would cost more than it wins in so short a life.
"""

from __future__ import annotations

from typing import Final

from tests.tidy import ROOT

__all__ = ["SHORT_LIVED", "SHORT_LIVED_JAVA"]

SHORT_LIVED_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of the Java machine; a demo takes two thirds of the processor time with them."""

SHORT_LIVED: Final = {"PYTHONPATH": str(ROOT), "JAVA_TOOL_OPTIONS": SHORT_LIVED_JAVA}
"""Environment of a program of this repository that runs for a test, and of all Java that it starts."""
