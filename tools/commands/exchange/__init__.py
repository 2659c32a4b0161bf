"""Commands that bring rows into a store, and out of it."""
