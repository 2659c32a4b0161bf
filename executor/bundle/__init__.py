"""What one interval handles under one commit: deduplication, grouping by key, user code, row updates."""
