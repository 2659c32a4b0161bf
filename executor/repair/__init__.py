"""Takes a damaged store back to its newest intact version."""
