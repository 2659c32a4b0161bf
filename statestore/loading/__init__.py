"""Rows made of a table: where it comes from, how its columns become rows, and the commit that adds them."""
