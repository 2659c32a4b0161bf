"""Benchmarks of Millpond's costs; run them from the root of the repository."""
