"""The runner that works on Spark."""
