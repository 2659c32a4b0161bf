"""Loads: rows of a table become the initial rows of a computation."""
