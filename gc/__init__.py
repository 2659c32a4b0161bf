"""Garbage collection, bounded by the horizon and the fence; import it as ``millpond.gc``.

Compaction rewrites row files without dead rows, delivered productions and expired record ids (MillWheel §6.1.1, §6.1.2).
A `round` deletes files that the table has removed, files that no commit ever named, and commits behind a checkpoint. No collector deletes a file that a version at or after the horizon needs.
"""
