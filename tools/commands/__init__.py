"""The commands of ``millpond``, one module each."""
