"""Versions of a store: lineage, savepoints, forks, and checks of the whole log."""
