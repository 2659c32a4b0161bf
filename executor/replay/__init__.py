"""Replay: what would have come of the same input, from an older version on, and how that differs."""
