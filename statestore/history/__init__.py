"""History of a store: one log walker, lineage, savepoints, forks, and verification."""
