"""Typed columns that views show next to the stored texts: parts of keys, and what is inside states."""
