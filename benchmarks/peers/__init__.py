"""Windowed sums on Millpond, on Spark's own operators, and on other engines; see ``python -m benchmarks.peers --help``."""
