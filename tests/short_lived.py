"""
How Java runs where it lives for a test: its second compiler would cost more than it wins in so short a life.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SHORT_LIVED_JAVA"]

SHORT_LIVED_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of the Java machine; a demo takes two thirds of the processor time with them."""
