"""Repair, rewind, fork, replay and comparison of stores."""
