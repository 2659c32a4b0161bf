"""Code written for Spark's stateful operators, by which these and Millpond are compared."""
