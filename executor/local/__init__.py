"""The runner that works in your own process."""
