"""The shipped test kit: models, strategies, faults, and servers to run against."""
