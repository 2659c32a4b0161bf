"""Code written for Spark's stateful operators, run as computations."""
