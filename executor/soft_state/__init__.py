"""Memory of one interval that can be rebuilt from the store: rows, record ids, known files."""
