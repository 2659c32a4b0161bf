"""Work in parallel with the supersteps: compaction and garbage collection, scheduled and offline."""
