"""Garbage collection: one collector per kind of garbage, bounded by the horizon and the fence.

Compaction (`compaction_plan`, `compaction`) rewrites row files without dead rows, delivered productions and
expired record ids (MillWheel §6.1.1, §6.1.2). A round (`round`) deletes files: `vacuum` those that the
table has removed, `orphan` those that no commit ever named, `log` the commits behind a checkpoint. No
collector deletes a file that a version at or after the `horizon` needs. Import it as ``millpond.gc``.
"""
