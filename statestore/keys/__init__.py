"""Typed keys: a tuple of values as one text that is ordered as the tuples are."""
