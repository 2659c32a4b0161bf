"""Slow, obvious models that tests compare the engine with."""
