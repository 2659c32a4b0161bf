"""Garbage collection, bounded by the horizon and the fence; import it as ``millpond.gc``."""
