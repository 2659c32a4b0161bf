"""
Work beside the supersteps: compaction and garbage collection, scheduled and offline.
"""
