"""Zeitgeist (MillWheel §2) on a year of real flights: what is out of the ordinary, and when.

``python -m examples.zeitgeist`` runs it; `computations` is the part to read first.
"""
