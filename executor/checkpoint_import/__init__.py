"""The state of queries that ran on Spark's own operators: read from their checkpoints, made rows of a store."""
