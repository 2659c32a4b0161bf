"""Versions of the table that are kept: savepoints, and the checkpoints from which they are read."""
