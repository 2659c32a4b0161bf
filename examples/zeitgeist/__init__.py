"""Zeitgeist (MillWheel §2) on a year of real flights: which hours were unusual, and when the alarm came.

``python -m examples.zeitgeist`` runs it; `computations` is the part to read first.
"""
