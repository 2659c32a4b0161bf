"""Integrity: verify a store, and read as much as possible of a damaged one."""
