"""Faults: damaged stores, failing object stores, and a report of what tests injected."""
